"""A draft's tree and copied text in one tree, under one node budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.decoding.drafter import Drafter
from specextend.decoding.options import TreeOptions
from specextend.decoding.tree import DraftTree
from specextend.drafters.copy_tree import Node, as_draft_tree, children_of
from specextend.drafters.copying import Copying

DRAFT_SHARE = 0.13
"""Of a step's time that drafting takes (the shipped EAGLE head on two cores); without it a step is that much faster."""
_PRIOR_GAIN = 1.0
_MEMORY = 0.9
"""What the running gain keeps of itself in a step."""


@dataclass(slots=True)
class _Row:
    copying: Copying
    promised: float = _PRIOR_GAIN
    """Accepted tokens that the draft's own tree promises, a running mean."""

    @property
    def draft_gain(self) -> float:
        """Accepted tokens to expect of the draft's own tree."""
        return self.promised * self.copying.draft_factor


class MergedDrafter:
    """Merges copies into another drafter's trees, and leaves that drafter out where copies alone bring more per second.

    Lengths are cut to what a request may still say, so copies need no room behind its last token.
    """

    def __init__(self, draft: Drafter, tree: TreeOptions, device: torch.device) -> None:
        """`device` of the trees."""
        self._draft, self._options, self._device = draft, tree, device
        self._rows: dict[int, _Row] = {}

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The draft's."""
        return self._draft.hidden_layers

    @property
    def num_levels(self) -> int:
        """Tree levels at most."""
        return max(self._draft.num_levels, self._options.ngram_depth)

    def admit(self, row: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Make room for a sequence; False where there is none now.

        A draft runs what is new of a batch padded to the longest, which may be a copy deeper than its own trees.
        """
        if not self._draft.admit(row, num_prompt_tokens, max_new_tokens + self._options.ngram_depth):
            return False
        self._rows[row] = _Row(Copying(num_prompt_tokens, max_new_tokens))
        return True

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """The next chunk of the prompt: token_ids [T] and the target's features [T, F] at them."""
        self._rows[row].copying.read(token_ids.tolist())
        self._draft.prefill(row, token_ids, hidden)

    def select(self, row: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S]; copies see all."""
        self._draft.select(row, positions)

    def absorb(self, rows: Sequence[int], token_ids: Sequence[list[int]], hidden: Sequence[Tensor]) -> None:
        """Newly decided tokens of each row, the new root last; the target's features [n, F], one before each."""
        for row, new in zip(rows, token_ids, strict=True):
            self._rows[row].copying.absorb(new)
        self._draft.absorb(rows, token_ids, hidden)

    def propose(self, rows: Sequence[int]) -> list[DraftTree]:
        """A tree behind each row's root: the likeliest nodes of both."""
        trees = {row: self._rows[row].copying.propose(*self._limits, {}) for row in rows}
        lacking = [row for row in rows if self._draft_pays(self._rows[row], trees[row])]
        if lacking:
            drafted = self._draft.propose(lacking)
            trees |= {row: self._merge(self._rows[row], tree) for row, tree in zip(lacking, drafted, strict=True)}
        return [as_draft_tree(trees[row], self._device) for row in rows]

    def release(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)
        self._draft.release(row)

    @property
    def _limits(self) -> tuple[int, int]:
        return self._options.most_nodes, self.num_levels

    def _draft_pays(self, row: _Row, copies: Sequence[Node]) -> bool:
        """Whether drafting brings more tokens per second than these copies alone."""
        return row.copying.most_levels > 0 and draft_pays(copies, row.draft_gain)

    def _merge(self, row: _Row, tree: DraftTree) -> list[Node]:
        promised = float(tree.log_probs[1:].exp().sum())
        row.promised = _MEMORY * row.promised + (1 - _MEMORY) * promised
        return row.copying.propose(*self._limits, children_of(tree))


def draft_pays(copies: Sequence[Node], draft_gain: float) -> bool:
    """Whether a step with a draft's tree, `draft_gain` tokens by itself, brings more per second than copies alone.

    The draft helps where no copy holds the next token; its own share of the step's time is what copies alone save.
    """
    expected = 1 + sum(node.probability for node in copies[1:])
    missed = max(0.0, 1 - sum(node.probability for node in copies if node.depth == 1))
    return expected + missed * draft_gain > expected / (1 - DRAFT_SHARE)
