"""Draft trees: the data structure, and OPT-Tree's way to grow them (METHOD, step 4).

Shapes: `B` sequences, `N` tree nodes (root included), `F` frontier nodes, `P` pooled candidates, `M` expanded nodes,
`V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specextend.decoding.options import TreeOptions


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One sequence's proposal. Node 0 is the root, whose parent is -1; parents come first."""

    token_ids: Tensor
    """[N] int64"""
    parents: Tensor
    """[N] int64"""
    depths: Tensor
    """[N] int64, 0 for the root"""
    log_probs: Tensor
    """[N] fp32: of the path from the root, by the draft"""


def root_only(token_id: int, device: torch.device) -> DraftTree:
    """The tree of a plain step: nothing is proposed."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return DraftTree(zero + token_id, zero - 1, zero, torch.zeros(1, device=device))


def tree_mask(parents: Tensor, max_depth: int) -> Tensor:
    """[B, N, N] bool from parents [B, N]: a node sees itself and its ancestors."""
    batch, num_nodes = parents.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    ancestors = parents.clamp(min=0)
    for _ in range(max_depth):
        mask.scatter_(2, ancestors.unsqueeze(2), True)
        ancestors = parents.gather(1, ancestors).clamp(min=0)
    return mask


def stack_trees(trees: list[DraftTree]) -> DraftTree:
    """A batch of trees of 1 to N nodes as one of [B, N] tensors.

    Padding hangs below nothing (parent -1) at depth 0; `verify` must not be shown it.
    """
    return DraftTree(
        pad_sequence([tree.token_ids for tree in trees], batch_first=True),
        pad_sequence([tree.parents for tree in trees], batch_first=True, padding_value=-1),
        pad_sequence([tree.depths for tree in trees], batch_first=True),
        pad_sequence([tree.log_probs for tree in trees], batch_first=True, padding_value=-inf),
    )


Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(token_ids [B, F], parent_slots [B, F], mask [B, F, M], depth) -> logits [B, F, V] of their children.

`parent_slots` number the previous call's F nodes; the last F of the M expanded nodes are these."""


@dataclass(slots=True)
class _Pool:
    """Candidates so far, by level, so that a stable sort prefers the shallower of two equals."""

    token_ids: Tensor  # [B, P]
    parents: Tensor  # [B, P] pool numbers; -1: child of the root
    log_probs: Tensor  # [B, P]
    depths: Tensor  # [P]
    level: int = 0  # number of the deepest level's first node

    def best(self, num_nodes: int) -> Tensor:
        """[B, n] pool numbers of the likeliest, these first."""
        return self.log_probs.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]

    def expected_accepted(self, num_nodes: int) -> Tensor:
        """[B] accepted tokens to expect of the best nodes: the sum of their path probabilities."""
        best = self.log_probs.topk(min(num_nodes, self.log_probs.shape[1]), dim=1).values
        return best.exp().sum(1)

    def append(self, token_ids: Tensor, parents: Tensor, log_probs: Tensor, depth: int) -> None:
        self.level = self.depths.shape[0]
        self.token_ids = torch.cat([self.token_ids, token_ids], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.log_probs = torch.cat([self.log_probs, log_probs], 1)
        self.depths = torch.cat([self.depths, self.depths.new_full((token_ids.shape[1],), depth)])


def _children(logits: Tensor, log_probs: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest children of F nodes: entry of the logits, number of the parent among the F, path log_probs.

    logits [B, F, V], log_probs [B, F] of the parents' paths; [B, n] each.
    """
    width = min(num_nodes, logits.shape[-1])
    logits = logits.float()
    top = logits.topk(width, dim=-1)
    weights = top.values - logits.logsumexp(-1, keepdim=True) + log_probs.unsqueeze(-1)
    best = weights.flatten(1).topk(min(num_nodes, weights.flatten(1).shape[1]), dim=1)
    return top.indices.flatten(1).gather(1, best.indices), best.indices // width, best.values


def grow_trees(
    root_token_ids: Tensor,
    root_logits: Tensor,
    expand: Expand,
    options: TreeOptions,
    *,
    adaptive: bool,
    vocabulary: Tensor | None = None,
) -> list[DraftTree]:
    """The `options.most_nodes` likeliest nodes that `options.depth` levels of drafting find, per sequence.

    root_token_ids [B], root_logits [B, V]. Weights only shrink along a path, so the ancestors of a chosen node are
    chosen too, and a node outside the best so far can have no descendant among the best at the end: it is not
    expanded. `adaptive` stops each sequence at `options.threshold` and narrows a level to the nodes worth expanding,
    at the price of a host sync a level; without it every level runs at full width (fixed shapes). `vocabulary` [V]
    are the token ids of a reduced draft's logits.
    """
    entries, _, log_probs = _children(root_logits.unsqueeze(1), root_logits.new_zeros(1, 1), options.most_nodes)
    token_ids = entries if vocabulary is None else vocabulary[entries]
    pool = _Pool(token_ids, torch.full_like(token_ids, -1), log_probs, torch.ones_like(token_ids[0]))
    frontier, mask = pool.parents[:, :0], torch.zeros(len(token_ids), 0, 0, dtype=torch.bool, device=token_ids.device)
    stopped = torch.zeros_like(token_ids[:, :1], dtype=torch.bool)
    expected = pool.expected_accepted(options.most_nodes)
    for depth in range(1, options.depth):
        previous, frontier = frontier, _next_frontier(pool, options.most_nodes, adaptive=adaptive)
        if frontier.shape[1] == 0:
            break
        slots = _parent_slots(pool, previous, frontier)
        mask = _frontier_mask(mask, slots)
        logits = expand(pool.token_ids.gather(1, frontier), slots, mask, depth)
        weights = pool.log_probs.gather(1, frontier).masked_fill(stopped, float("-inf"))
        entries, parents, log_probs = _children(logits, weights, options.most_nodes)
        token_ids = entries if vocabulary is None else vocabulary[entries]
        pool.append(token_ids, frontier.gather(1, parents), log_probs, depth + 1)
        if adaptive:
            before, expected = expected, pool.expected_accepted(options.most_nodes)
            stopped |= (expected - before).unsqueeze(1) < options.threshold
            if bool(stopped.all()):
                break
    return _finish(root_token_ids, pool, options.most_nodes)


def _next_frontier(pool: _Pool, num_nodes: int, *, adaptive: bool) -> Tensor:
    """[B, F] pool numbers of the deepest level's nodes; adaptive: of those among the best so far, likeliest first."""
    batch, size = pool.parents.shape
    level = torch.arange(pool.level, size, device=pool.parents.device).expand(batch, -1)
    if not adaptive:
        return level
    live = torch.zeros_like(pool.parents, dtype=torch.bool).scatter_(1, pool.best(num_nodes), True)[:, pool.level :]
    order = live.int().sort(dim=1, descending=True, stable=True).indices
    return level.gather(1, order[:, : int(live.sum(1).max())])


def _parent_slots(pool: _Pool, previous: Tensor, frontier: Tensor) -> Tensor:
    """[B, F] where in the previous frontier each node's parent stands; 0 for children of the root."""
    parents = pool.parents.gather(1, frontier)
    if previous.shape[1] == 0:
        return torch.zeros_like(parents)
    return (parents.unsqueeze(2) == previous.unsqueeze(1)).int().argmax(2)


def _frontier_mask(seen: Tensor, slots: Tensor) -> Tensor:
    """[B, F, M + F]: a node sees what its parent saw [B, F of before, M], and itself."""
    batch, width = slots.shape
    own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)
    if seen.shape[1] == 0:
        return own
    return torch.cat([seen.gather(1, slots.unsqueeze(2).expand(-1, -1, seen.shape[2])), own], 2)


def _finish(root_token_ids: Tensor, pool: _Pool, num_nodes: int) -> list[DraftTree]:
    """Number the best nodes from 1, behind the root."""
    best = pool.best(num_nodes).sort(dim=1).values
    batch = best.shape[0]
    numbers = torch.zeros(batch, pool.parents.shape[1] + 1, dtype=torch.int64, device=best.device)
    numbers.scatter_(1, best + 1, torch.arange(1, best.shape[1] + 1, device=best.device).expand(batch, -1))
    parents = numbers.gather(1, pool.parents.gather(1, best) + 1)  # pool number -1, the root, is entry 0
    zero = parents.new_zeros(batch, 1)
    token_ids = torch.cat([root_token_ids.unsqueeze(1), pool.token_ids.gather(1, best)], 1)
    parents = torch.cat([zero - 1, parents], 1)
    depths = torch.cat([zero, pool.depths.expand(batch, -1).gather(1, best)], 1)
    log_probs = torch.cat([zero.float(), pool.log_probs.gather(1, best)], 1)
    return [DraftTree(*parts) for parts in zip(token_ids, parents, depths, log_probs, strict=True)]
