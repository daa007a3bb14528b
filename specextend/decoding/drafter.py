"""What the engine asks of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specextend.decoding.tree import DraftTree


class Drafter(Protocol):
    """Proposes trees. A `row` is the engine's number for a running sequence.

    Calls for a row: `admit`, `prefill` chunk by chunk, `select`, `absorb` of the first root, then rounds of
    `propose`, `select` where the cache policy says so, `absorb`; at the end `release`.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers, ascending, counted from 0, whose outputs side by side are the features [.., F] of a position.

        Empty: the features are the last hidden state, after the final norm.
        """

    @property
    def num_levels(self) -> int:
        """Tree levels at most: entries of the acceptance histogram less one."""

    def admit(self, row: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Make room for a sequence; False where there is none now."""

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """The next chunk of the prompt: token_ids [T] and the target's features [T, F] at them."""

    def select(self, row: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S], ascending, and what `absorb` adds later."""

    def absorb(self, rows: Sequence[int], token_ids: Sequence[list[int]], hidden: Sequence[Tensor]) -> None:
        """Newly decided tokens of each row, the new root last; the target's features [n, F], one before each."""

    def propose(self, rows: Sequence[int]) -> list[DraftTree]:
        """A tree behind each row's root."""

    def release(self, row: int) -> None:
        """Forget the row."""
