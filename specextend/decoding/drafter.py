"""The interface between the engine and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specextend.decoding.tree import DraftTrees


@dataclass(frozen=True, slots=True)
class Decided:
    """Holds what the target decided for B sequences, for the draft to read: in a step, or in several.

    `T` is the width of the padded tensors, `F` the features of a position.
    """

    token_ids: Sequence[list[int]]
    """Each sequence's newly decided tokens, the new root last."""
    padded: Tensor
    """[B, T] int64: the same on the device, with -1 behind them"""
    features: Tensor
    """[B, T, F]: the target's, at the position before each token; padding is not read"""

    @classmethod
    def pad(cls, token_ids: Sequence[list[int]], features: Sequence[Tensor]) -> Decided:
        """Make it from each sequence's tokens and its features [n, F]."""
        width = max(len(new) for new in token_ids)
        rows = [new + [-1] * (width - len(new)) for new in token_ids]
        padded = torch.tensor(rows, device=features[0].device)
        return cls(token_ids, padded, pad_sequence(list(features), batch_first=True))


class Drafter(Protocol):
    """Proposes trees. A `slot` is a sequence's place in the batch.

    For each slot the engine calls `admit`, `prefill` chunk by chunk, `select`, and `absorb` of the first root; then, in
    rounds, `propose`, `select` if the cache policy says so, and `absorb`; at the end `release`.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Return the target's layers, ascending from 0, whose concatenated outputs are a position's features [.., F].

        Without layers the features are the last hidden state, after the final norm.
        """

    @property
    def num_levels(self) -> int:
        """Return the largest number of tree levels; the acceptance histogram has one entry more."""

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False if there is none now."""

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read the next chunk of the prompt: token_ids [T] and the target's features [T, F] at them."""

    def select(self, slot: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S], ascending and on the host, and what `absorb` adds later."""

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Read what was decided for these slots."""

    def propose(self, slots: Sequence[int]) -> DraftTrees:
        """Propose a tree behind each slot's root."""

    def release(self, slot: int) -> None:
        """Free the slot."""
