"""What a draft network must offer to be run by `CausalDrafter`.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.draft_cache import DraftCache

HISTORY = 3
"""Tokens before a token that a network may read."""


def last_tokens(before: Tensor | None, token_ids: Tensor) -> Tensor:
    """[3 + T]: the new token_ids [T] behind the three `before` them, which at a text's start are its first token."""
    return torch.cat([token_ids[:1].expand(HISTORY) if before is None else before, token_ids])


def histories(text: Tensor) -> Tensor:
    """[T, 3]: the three tokens before each token of text [3 + T] but the first three, nearest first."""
    return text[:-1].unfold(0, HISTORY, 1).flip(1)


class DraftNetwork(Protocol):
    """Weights, without any state of a sequence."""

    cache: DraftCache
    vocabulary: Tensor | None
    """[V] int64 token ids of the logits; None: all of the target's, in order."""
    hidden_layers: tuple[int, ...]
    """Target layers, ascending, whose outputs side by side are the features [.., F]; empty: the last hidden state."""
    reads_history: bool
    """Whether `forward` needs the tokens before each token."""

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Put the next chunk of a prompt into the full cache: token_ids [T], features [T, F] of the target."""

    def num_staging_rows(self) -> int:
        """Working rows that prefill needs for itself."""

    def release(self, row: int) -> None:
        """Forget what prefill left of the row."""

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, history: Tensor | None
    ) -> Tensor:
        """Hidden [B, T, C] of token_ids [B, T] at slot `positions` [B, T].

        `hidden` is what goes with each token: the target's features [B, T, F] one position before it, or the
        network's own output [B, T, C] for its parent. Working rows are written as the plan says. `history` [B, T, 3]
        are the three tokens before each token, nearest first; None where the network does not read them.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden [..., C]."""
