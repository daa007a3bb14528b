"""Drafts without a model: text that the prompt or the output has said before.

Prompt lookup (Saxena 2023) and suffix decoding (Oliaro and others, arXiv 2411.04975) propose what followed the longest
match of the text's end. Here all its matches propose, and the tree holds what is likeliest by rates learned on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specextend.decoding.options import TreeOptions
from specextend.decoding.tree import DraftTree
from specextend.drafters.copy_tree import as_draft_tree
from specextend.drafters.copying import Copying


class NgramDrafter:
    """Proposes copies. It reads tokens only, and sees all of them: what `select` shows does not matter to it."""

    def __init__(self, tree: TreeOptions, device: torch.device) -> None:
        """`device` of the trees."""
        self._options, self._device = tree, device
        self._rows: dict[int, Copying] = {}

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: the features are not read."""
        return ()

    @property
    def num_levels(self) -> int:
        """Tree levels at most."""
        return self._options.ngram_depth

    def admit(self, row: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """There is always room."""
        self._rows[row] = Copying(num_prompt_tokens, max_new_tokens)
        return True

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """The next chunk of the prompt: token_ids [T]."""
        self._rows[row].read(token_ids.tolist())

    def select(self, row: int, positions: Tensor) -> None:
        """Nothing is hidden."""

    def absorb(self, rows: Sequence[int], token_ids: Sequence[list[int]], hidden: Sequence[Tensor]) -> None:
        """Newly decided tokens of each row, the new root last."""
        for row, new in zip(rows, token_ids, strict=True):
            self._rows[row].absorb(new)

    def propose(self, rows: Sequence[int]) -> list[DraftTree]:
        """A tree behind each row's root; only the root where nothing matches."""
        num_nodes, depth = self._options.most_nodes, self._options.ngram_depth
        return [as_draft_tree(self._rows[row].propose(num_nodes, depth, {}), self._device) for row in rows]

    def release(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)
