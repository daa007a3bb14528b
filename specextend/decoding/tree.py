"""Draft trees: the data structure, growing them (OPT-Tree, arXiv 2406.17276), pruning and verifying them.

Shapes: `B` sequences, `N` tree nodes (root included), `F` frontier nodes, `P` pooled candidates, `M` expanded nodes,
`V` vocabulary, `W` nodes of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from specextend.decoding.decoding_options import TreeOptions


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


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """The proposals for B sequences, as a `DraftTree` each, padded to N nodes. Padding has no parent and is no root."""

    token_ids: Tensor
    """[B, N] int64; padding 0"""
    parents: Tensor
    """[B, N] int64; padding -1"""
    depths: Tensor
    """[B, N] int64; padding 0"""
    log_probs: Tensor
    """[B, N] fp32; padding -inf"""
    sizes: list[int]
    """[B] number of nodes, 1 to N"""

    @property
    def num_nodes(self) -> int:
        """Return N."""
        return self.token_ids.shape[1]

    def __len__(self) -> int:
        """Return B."""
        return len(self.sizes)

    def __getitem__(self, b: int) -> DraftTree:
        """Return the tree of sequence b, without padding."""
        n = self.sizes[b]
        return DraftTree(self.token_ids[b, :n], self.parents[b, :n], self.depths[b, :n], self.log_probs[b, :n])

    def __iter__(self) -> Iterator[DraftTree]:
        """Yield each sequence's tree, without padding."""
        return (self[b] for b in range(len(self)))


def roots_only(token_ids: Sequence[int], device: torch.device) -> DraftTrees:
    """Make the trees of a plain step, in which nothing is proposed behind the last tokens [B]."""
    roots = torch.tensor(token_ids, device=device).unsqueeze(1)
    zeros = torch.zeros_like(roots)
    return DraftTrees(roots, zeros - 1, zeros, zeros.float(), [1] * len(token_ids))


def among_roots(trees: DraftTrees, places: Sequence[int], token_ids: Sequence[int]) -> DraftTrees:
    """Put the trees at `places` of a larger batch; nothing is proposed behind the other last tokens of `token_ids`."""
    uploaded = torch.tensor([*places, *token_ids], device=trees.token_ids.device)
    index, roots = uploaded.split([len(places), len(token_ids)])

    def placed(values: Tensor, padding: float) -> Tensor:
        return values.new_full((len(roots), trees.num_nodes), padding).index_copy_(0, index, values)

    token_ids_placed, log_probs = placed(trees.token_ids, 0), placed(trees.log_probs, -inf)
    token_ids_placed[:, 0] = roots
    log_probs[:, 0] = 0
    sizes = [1] * len(token_ids)
    for place, size in zip(places, trees.sizes, strict=True):
        sizes[place] = size
    return DraftTrees(token_ids_placed, placed(trees.parents, -1), placed(trees.depths, 0), log_probs, sizes)


def tree_mask(parents: Tensor, max_depth: int) -> Tensor:
    """Make the mask [B, N, N] bool of parents [B, N]: a node sees itself and its ancestors."""
    batch, num_nodes = parents.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    ancestors = parents.clamp(min=0)
    for _ in range(max_depth):
        mask.scatter_(2, ancestors.unsqueeze(2), True)
        ancestors = parents.gather(1, ancestors).clamp(min=0)
    return mask


Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(token_ids [B, F], parent_indices [B, F], mask [B, F, M], depth) -> logits [B, F, V] of their children.

`parent_indices` count the nodes of the previous call; the last F of the M expanded nodes are the call's own."""


@dataclass(slots=True)
class _Candidates:
    """All nodes found so far, level by level, so that a stable sort prefers the shallower of two equals."""

    token_ids: Tensor  # [B, P]
    parents: Tensor  # [B, P] candidate numbers; -1: child of the root
    log_probs: Tensor  # [B, P]
    depths: Tensor  # [P]
    level: int = 0  # number of the deepest level's first node

    def best(self, num_nodes: int) -> Tensor:
        """Return the candidate numbers [B, n] of the likeliest nodes, likeliest first."""
        return self.log_probs.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]

    def expected_accepted(self, num_nodes: int) -> Tensor:
        """Return the accepted tokens [B] to expect of the best nodes: the sum of their path probabilities."""
        best = self.log_probs.topk(min(num_nodes, self.log_probs.shape[1]), dim=1).values
        return best.exp().sum(1)

    def append(self, token_ids: Tensor, parents: Tensor, log_probs: Tensor, depth: int) -> None:
        self.level = self.depths.shape[0]
        self.token_ids = torch.cat([self.token_ids, token_ids], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.log_probs = torch.cat([self.log_probs, log_probs], 1)
        self.depths = torch.cat([self.depths, self.depths.new_full((token_ids.shape[1],), depth)])


def _children(logits: Tensor, log_probs: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the likeliest children of F nodes, [B, n] each: entry of the logits, parent among the F, path log_probs.

    logits [B, F, V] of the children, log_probs [B, F] of the parents' paths.
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
) -> DraftTrees:
    """Grow each sequence's tree of the `options.most_nodes` likeliest nodes in `options.depth` levels of drafting.

    root_token_ids [B], root_logits [B, V]. Path probabilities only shrink along a path, so the ancestors of a chosen
    node are chosen too, and a node outside the best so far is not expanded, because none of its descendants can be
    among the best at the end. `adaptive` stops each sequence at `options.threshold` and narrows a level to the nodes
    worth expanding, which costs one host sync per level; without it every level runs at full width (fixed shapes).
    `vocabulary` [V] holds the token ids of a reduced draft's logits.
    """
    entries, _, log_probs = _children(root_logits.unsqueeze(1), root_logits.new_zeros(1, 1), options.most_nodes)
    token_ids = entries if vocabulary is None else vocabulary[entries]
    pool = _Candidates(token_ids, torch.full_like(token_ids, -1), log_probs, torch.ones_like(token_ids[0]))
    frontier, mask = pool.parents[:, :0], torch.zeros(len(token_ids), 0, 0, dtype=torch.bool, device=token_ids.device)
    stopped = torch.zeros_like(token_ids[:, :1], dtype=torch.bool)
    expected = pool.expected_accepted(options.most_nodes)
    for depth in range(1, options.depth):
        previous, frontier = frontier, _next_frontier(pool, options.most_nodes, adaptive=adaptive)
        if frontier.shape[1] == 0:
            break
        indices = _parent_indices(pool, previous, frontier)
        mask = _frontier_mask(mask, indices)
        logits = expand(pool.token_ids.gather(1, frontier), indices, mask, depth)
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


def _next_frontier(pool: _Candidates, num_nodes: int, *, adaptive: bool) -> Tensor:
    """Return the candidate numbers [B, F] of the nodes to expand, which are those of the deepest level.

    With `adaptive`, only those among the best so far, likeliest first.
    """
    batch, size = pool.parents.shape
    level = torch.arange(pool.level, size, device=pool.parents.device).expand(batch, -1)
    if not adaptive:
        return level
    live = torch.zeros_like(pool.parents, dtype=torch.bool).scatter_(1, pool.best(num_nodes), True)[:, pool.level :]
    order = live.int().sort(dim=1, descending=True, stable=True).indices
    return level.gather(1, order[:, : int(live.sum(1).max())])


def _parent_indices(pool: _Candidates, previous: Tensor, frontier: Tensor) -> Tensor:
    """Return the index [B, F] of each node's parent in the previous frontier; 0 for children of the root."""
    parents = pool.parents.gather(1, frontier)
    if previous.shape[1] == 0:
        return torch.zeros_like(parents)
    return (parents.unsqueeze(2) == previous.unsqueeze(1)).int().argmax(2)


def _frontier_mask(seen: Tensor, indices: Tensor) -> Tensor:
    """Make the mask [B, F, M + F]: a node sees what its parent saw (`seen` [B, F of before, M]), and itself."""
    batch, width = indices.shape
    own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)
    if seen.shape[1] == 0:
        return own
    return torch.cat([seen.gather(1, indices.unsqueeze(2).expand(-1, -1, seen.shape[2])), own], 2)


def _finish(root_token_ids: Tensor, pool: _Candidates, num_nodes: int) -> DraftTrees:
    """Make the trees: the root, and the best nodes numbered from 1."""
    best = pool.best(num_nodes).sort(dim=1).values
    batch = best.shape[0]
    numbers = torch.zeros(batch, pool.parents.shape[1] + 1, dtype=torch.int64, device=best.device)
    numbers.scatter_(1, best + 1, torch.arange(1, best.shape[1] + 1, device=best.device).expand(batch, -1))
    parents = numbers.gather(1, pool.parents.gather(1, best) + 1)  # candidate -1, the root, is entry 0
    zero = parents.new_zeros(batch, 1)
    token_ids = torch.cat([root_token_ids.unsqueeze(1), pool.token_ids.gather(1, best)], 1)
    parents = torch.cat([zero - 1, parents], 1)
    depths = torch.cat([zero, pool.depths.expand(batch, -1).gather(1, best)], 1)
    log_probs = torch.cat([zero.float(), pool.log_probs.gather(1, best)], 1)
    return DraftTrees(token_ids, parents, depths, log_probs, [1 + best.shape[1]] * batch)


def prune(trees: DraftTrees, num_nodes: int) -> DraftTrees:
    """Keep the `num_nodes` likeliest nodes of each tree, including its root; smaller trees are returned unchanged.

    Path probabilities never grow towards the leaves, parents come first, and of two equal nodes the earlier one is
    kept. So the ancestors of a kept node are kept too.
    """
    if trees.num_nodes <= num_nodes:
        return trees
    kept = trees.log_probs.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(dim=1).values
    numbers = torch.zeros_like(trees.parents)
    numbers.scatter_(1, kept, torch.arange(1, num_nodes + 1, device=kept.device).expand_as(kept))
    numbers = pad(numbers, (1, 0))  # place 0 is that of parent -1
    parents = numbers.gather(1, trees.parents.gather(1, kept) + 1) - 1
    token_ids, depths, log_probs = (each.gather(1, kept) for each in (trees.token_ids, trees.depths, trees.log_probs))
    return DraftTrees(token_ids, parents, depths, log_probs, [min(size, num_nodes) for size in trees.sizes])


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying trees: what a step commits. `W` is the length of the longest possible path."""

    paths: Tensor
    """[B, W] int64: the accepted nodes, the root first; behind them place i holds node i"""
    token_ids: Tensor
    """[B, W] int64: the target's token after each accepted node, which are the tokens that the step decides: accepted
    draft tokens, and one of the target's own; -1 behind them"""

    def decided(self) -> list[list[int]]:
        """Return each sequence's decided tokens: one small download, for which the host has to wait."""
        return [[token_id for token_id in row if token_id >= 0] for row in self.token_ids.tolist()]


def verify(token_ids: Tensor, parents: Tensor, chosen: Tensor, max_depth: int) -> Verdict:
    """Follow the target's choices from each root for as long as the tree contains them, `max_depth` levels at most.

    token_ids and parents [B, N] are those of the trees; `chosen` [B, N] is the target's token after each node. The host
    is not asked. Padding, which has no parent, is never accepted.
    """
    batch, num_nodes = parents.shape
    numbers = torch.arange(num_nodes + 1, device=parents.device)
    places = parents + 1  # node n has place n + 1; place 0 is no node, and nothing is chosen after it
    choices = pad(chosen, (1, 0), value=-1)
    is_chosen = choices.gather(1, places) == token_ids
    child = places.new_zeros(batch, num_nodes + 1).scatter_(1, places * is_chosen, numbers[1:] * is_chosen)
    path = [numbers[1:2].expand(batch, 1)]
    for _ in range(min(max_depth, num_nodes - 1)):
        path.append(child.gather(1, path[-1]))
    steps = torch.cat(path, 1)
    return Verdict((steps - 1).where(steps > 0, numbers[: len(path)]), choices.gather(1, steps))
