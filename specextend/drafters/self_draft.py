"""The target as its own draft: it drafts while it sees only a part of its cache.

MagicDec (arXiv 2408.11049) and TriForce (arXiv 2404.11912) draft so where reading the cache takes longer than reading
the weights. The visible rows are copies of the target's own, with the positions that they have there.

Shapes: `B` sequences, `S` visible rows, `V` vocabulary, `K` children of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import KVCache, Region
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided, Drafter, DraftTrees


@dataclass(slots=True)
class _View:
    """Says what the target sees of a sequence while it drafts."""

    region: Region
    """Rows of the working cache."""
    length: int = 0
    """Decided tokens. The last one is the root, which the target's cache does not hold yet."""
    root_token_id: int = 0
    visible: int = 0
    """Rows in use."""
    known: int = 0
    """Tokens, from the first on, that are visible or were left out by `select`."""


class SelfDrafter(Drafter):
    """Drafts one path with the target itself; each node's next likeliest siblings fill up the tree.

    Every level is a forward pass of the whole target, for one token of each sequence. So it is worth asking the device
    after each one whether another is worth its time.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, target: CachedModel, tree: TreeOptions, num_rows: int, most_visible: int | None) -> None:
        """Take the target, whose weights are shared; `num_rows` are those of the working cache.

        `most_visible` is the largest number of visible rows of a sequence; None: all of its tokens.
        """
        self._target, self._tree, self._most_visible = target, tree, most_visible
        self.num_levels = tree.depth
        self._model = copy(target)
        num_layers, _, num_heads, _, head_dim = target.cache.stored.shape
        self._model.cache = KVCache(num_layers, num_rows, num_heads, head_dim, target.dtype, target.device)
        self._views: dict[int, _View] = {}

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False if there is none now."""
        visible = num_prompt_tokens + max_new_tokens
        if self._most_visible is not None:
            visible = min(visible, self._most_visible)
        region = self._model.cache.rows.take(visible + self.num_levels)
        if region is not None:
            self._views[slot] = _View(region)
        return region is not None

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Count the next tokens [T] of the prompt, which the target has read."""
        self._views[slot].length += len(token_ids)

    def select(self, slot: int, positions: Tensor) -> None:
        """Show these positions [S], ascending up to the last token in the target's cache, and what comes later."""
        view = self._views[slot]
        view.visible, view.known = 0, int(positions[-1]) + 1
        self._show(slot, positions.to(self._target.device))

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Show what the target has committed since; a view without room stays as it is until the next `select`."""
        for slot, new in zip(slots, decided.token_ids, strict=True):
            view = self._views[slot]
            view.length, view.root_token_id = view.length + len(new), new[-1]
            room = view.region.size - self.num_levels - view.visible
            end = min(view.length - 1, view.known + room)
            self._show(slot, torch.arange(view.known, end, device=self._target.device))
            view.known = view.length - 1

    def propose(self, slots: Sequence[int], num_nodes: int | None = None) -> DraftTrees:
        """Draft the likeliest path behind each slot's root, with siblings."""
        most_nodes = self._tree.most_nodes if num_nodes is None else num_nodes
        views = [self._views[slot] for slot in slots]
        token_ids = [torch.tensor([[view.root_token_id] for view in views], device=self._target.device)]
        log_probs = [torch.zeros(len(views), 1, device=self._target.device)]
        num_levels = min(self.num_levels, most_nodes)
        for depth in range(num_levels):
            children = self._run(views, token_ids[-1][:, :1], depth).float().log_softmax(-1)
            best = children.topk(min(most_nodes // num_levels, children.shape[-1]), dim=-1)
            token_ids.append(best.indices)
            log_probs.append(log_probs[-1][:, :1] + best.values)
            if bool((log_probs[-1][:, 0].exp() < self._tree.threshold).all()):
                break
        return _as_trees(token_ids, log_probs)

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._model.cache.rows.give_back(self._views.pop(slot).region)

    def _show(self, slot: int, positions: Tensor) -> None:
        """Copy the rows of positions [S] of the target's cache behind the visible ones."""
        view, source = self._views[slot], self._target.cache.regions[slot].start + positions
        first = view.region.start + view.visible
        view.visible += len(positions)
        assert view.visible + self.num_levels <= view.region.size, "the working cache is full"
        rows = slice(first, first + len(positions))
        self._model.cache.stored[:, :, :, rows] = self._target.cache.stored.index_select(3, source)

    def _run(self, views: Sequence[_View], token_ids: Tensor, depth: int) -> Tensor:
        """Run one node [B, 1] of each path, `depth` levels below its root; return logits [B, V] of its children."""
        plan = AttentionPlan([view.region.start for view in views], [view.visible + depth + 1 for view in views], 1)
        positions = torch.tensor([[view.length - 1 + depth] for view in views], device=token_ids.device)
        return self._model.logits(self._model.forward(token_ids, positions, plan))[:, 0]


def _as_trees(token_ids: Sequence[Tensor], log_probs: Sequence[Tensor]) -> DraftTrees:
    """Make trees of the roots [B, 1] and levels [B, K], whose nodes are children of the first node a level above."""
    (batch, width), device = token_ids[1].shape, token_ids[1].device
    levels = torch.arange(len(token_ids) - 1, device=device)
    parents = (1 + width * (levels - 1)).clamp(min=0).repeat_interleave(width)
    depths = (1 + levels).repeat_interleave(width)
    return DraftTrees(
        torch.cat(list(token_ids), 1),
        pad(parents, (1, 0), value=-1).expand(batch, -1),
        pad(depths, (1, 0)).expand(batch, -1),
        torch.cat(list(log_probs), 1),
        [1 + len(depths)] * batch,
    )
