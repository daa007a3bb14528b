"""The interface between the engine and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specextend.decoding.tree import DraftTrees


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
        """Let the draft see these committed positions [S], ascending, and what `absorb` adds later."""

    def absorb(self, slots: Sequence[int], token_ids: Sequence[list[int]], hidden: Sequence[Tensor]) -> None:
        """Read each slot's newly decided tokens, the new root last, and the target's features [n, F] before each."""

    def propose(self, slots: Sequence[int]) -> DraftTrees:
        """Propose a tree behind each slot's root."""

    def release(self, slot: int) -> None:
        """Free the slot."""
