"""Draft trees: what proposes them, growing them (OPT-Tree, arXiv 2406.17276), pruning and verifying
them.

Shapes: `B` sequences, `N` tree nodes (root included), `F` frontier nodes, `P` pooled candidates,
`M` expanded nodes, `V` vocabulary, `W` nodes of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.device import upload

_NEVER = -1e4
"""Least log probability of a path. NaN of a broken draft becomes it, too: as NaN it would be sorted
before the root.
"""


_PADDING = (0, -1, 0, -inf)
"""Of token ids, parents, depths and log probabilities."""


class TreeNode(NamedTuple):
    """A node of one tree, on the host."""

    parent: int
    token_id: int
    depth: int
    log_prob: float
    """Of the path from the root."""


@dataclass(frozen=True)
class DraftTrees:
    """The proposals for B sequences, padded to N nodes; those of one sequence have no first
    dimension and no padding.

    Node 0 is the root, whose parent is -1; parents come first. Padding has no parent and is no
    root.
    """

    token_ids: Tensor
    """[B, N] int64; padding 0"""
    parents: Tensor
    """[B, N] int64; padding -1"""
    depths: Tensor
    """[B, N] int64, 0 for the root; padding 0"""
    log_probs: Tensor
    """[B, N] fp32: of the path from the root, by the draft; padding -inf"""
    sizes: list[int]
    """[B] number of nodes, 1 to N"""

    @classmethod
    def of(cls, tensors: Iterable[Tensor], sizes: list[int]) -> DraftTrees:
        """Make them from what `tensors` returns."""
        token_ids, parents, depths, log_probs = tensors
        return cls(token_ids, parents, depths, log_probs, sizes)

    @classmethod
    def pad(cls, batch: Sequence[Sequence[TreeNode]], device: torch.device) -> DraftTrees:
        """Make them from the nodes of each tree."""
        num_nodes = max(map(len, batch))
        padding = TreeNode(-1, 0, 0, -inf)
        rows = [[*nodes, *[padding] * (num_nodes - len(nodes))] for nodes in batch]
        columns = (
            torch.tensor([[node[:3] for node in nodes] for nodes in rows])
            .permute(2, 0, 1)
            .contiguous()
        )
        parents, token_ids, depths = upload(columns, device)
        log_probs = upload(
            torch.tensor([[node.log_prob for node in nodes] for nodes in rows]), device
        )
        return cls(token_ids, parents, depths, log_probs, [*map(len, batch)])

    def padded(self, num_nodes: int) -> DraftTrees:
        """Return the trees padded to `num_nodes`, if they have fewer."""
        if num_nodes <= self.num_nodes:
            return self
        missing = 0, num_nodes - self.num_nodes
        pairs = zip(self.tensors, _PADDING, strict=True)
        padded = (pad(each, missing, value=value) for each, value in pairs)
        return DraftTrees.of(padded, self.sizes)

    def nodes(self) -> list[list[TreeNode]]:
        """Return the nodes of each tree, without padding."""
        columns = torch.stack([self.parents, self.token_ids, self.depths], 2).tolist()
        batch = zip(columns, self.log_probs.tolist(), self.sizes, strict=True)
        return [
            [
                TreeNode._make((*row, log_prob))
                for row, log_prob in zip(rows[:size], log_probs, strict=False)
            ]
            for rows, log_probs, size in batch
        ]

    def chains(self) -> DraftTrees:
        """Return the likeliest path of each tree, which is followed from the root on."""
        return DraftTrees.pad([*map(_likeliest_path, self.nodes())], self.token_ids.device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return token_ids, parents, depths and log_probs."""
        return self.token_ids, self.parents, self.depths, self.log_probs

    @property
    def num_nodes(self) -> int:
        """Return N."""
        return self.token_ids.shape[1]

    def __len__(self) -> int:
        """Return B."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[DraftTrees]:
        """Yield each sequence's tree, [N] without padding."""
        for b, n in enumerate(self.sizes):
            yield DraftTrees.of((each[b, :n] for each in self.tensors), [n])


def _likeliest_path(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """Return the root and, as long as there are children, the likeliest child of the last node."""
    path = [nodes[0]]
    place = 0
    while children := [at for at, node in enumerate(nodes) if node.parent == place]:
        place = max(children, key=lambda at: nodes[at].log_prob)
        path.append(nodes[place]._replace(parent=len(path) - 1))
    return path


def roots_only(token_ids: Sequence[int], device: torch.device) -> DraftTrees:
    """Make the trees of a plain step, in which nothing is proposed behind the last tokens [B]."""
    roots = upload(torch.tensor(token_ids), device).unsqueeze(1)
    zeros = torch.zeros_like(roots)
    return DraftTrees(roots, zeros - 1, zeros, zeros.float(), [1] * len(token_ids))


def among_roots(trees: DraftTrees, places: Sequence[int], token_ids: Sequence[int]) -> DraftTrees:
    """Put the trees at `places` of a larger batch; nothing is proposed behind the other last tokens
    of `token_ids`.
    """
    roots = roots_only(token_ids, trees.token_ids.device).padded(trees.num_nodes)
    index = upload(torch.tensor(places), trees.token_ids.device)
    pairs = zip(roots.tensors, trees.tensors, strict=True)
    sizes = dict(zip(places, trees.sizes, strict=True))
    return DraftTrees.of(
        (every.index_copy(0, index, each) for every, each in pairs),
        [sizes.get(place, 1) for place in range(len(token_ids))],
    )


def tree_mask(parents: Tensor, max_depth: int) -> Tensor:
    """Make the mask [B, N, N] bool of parents [B, N]: a node sees itself and its ancestors."""
    batch, num_nodes = parents.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    parents = parents.clamp(min=0)
    ancestors = parents
    for _ in range(min(max_depth, num_nodes - 1)):
        mask.scatter_(2, ancestors.unsqueeze(2), True)
        ancestors = parents.gather(1, ancestors)
    return mask


Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(token_ids [B, F], parent_indices [B, F], mask [B, F, M], depth) -> logits [B, F, V] of their
children.

`parent_indices` count the nodes of the previous call; the last F of the M expanded nodes are the
call's own.
"""


class _Level(NamedTuple):
    """Nodes of one depth, in any number n."""

    token_ids: Tensor  # [B, n]
    indices: Tensor  # [B, n] of each one's parent among the nodes expanded before, or all
    log_probs: Tensor  # [B, n] of paths

    def at(self, order: Tensor) -> _Level:
        """Return the nodes at places `order` [B, F]."""
        return _Level(*(each.gather(1, order) for each in self))


# All nodes found so far are a list of levels, the root first, so that a stable sort prefers the
# shallower of equals.


def _append(levels: list[_Level], level: _Level, order: Tensor | None) -> None:
    """Append the children of the deepest level's nodes at places `order` [B, F]; None: of all."""
    parents = level.indices if order is None else order.gather(1, level.indices)
    first = sum(each.token_ids.shape[1] for each in levels[:-1])
    levels.append(level._replace(indices=parents + first))


def _live(levels: list[_Level], num_nodes: int) -> Tensor:
    """Return the places [B, F] in the deepest level of those among the best nodes so far, likeliest
    first.
    """
    log_probs = torch.cat([each.log_probs for each in levels], 1)
    best = log_probs.sort(dim=1, descending=True, stable=True).indices[:, : 1 + num_nodes]
    live = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(1, best, True)
    live = live[:, -levels[-1].token_ids.shape[1] :]
    order = live.int().sort(dim=1, descending=True, stable=True).indices
    return order[:, : int(live.sum(1).max())]


def _expected_accepted(levels: list[_Level], num_nodes: int) -> Tensor:
    """Return the accepted tokens [B] to expect of the best nodes: the sum of their path
    probabilities.
    """
    log_probs = torch.cat([each.log_probs for each in levels[1:]], 1)
    return log_probs.topk(min(num_nodes, log_probs.shape[1]), dim=1).values.exp().sum(1)


def _best_of(levels: list[_Level], num_nodes: int) -> DraftTrees:
    """Make the trees of the root and the best nodes."""
    numbers = torch.arange(len(levels), device=levels[0].indices.device).split(1)
    pairs = zip(numbers, levels, strict=True)
    depths = torch.cat([number.expand(each.indices.shape[1]) for number, each in pairs])
    token_ids, parents, log_probs = (torch.cat(each, 1) for each in zip(*levels, strict=True))
    log_probs = log_probs.nan_to_num(nan=_NEVER).clamp(min=_NEVER)
    batch, size = parents.shape
    trees = DraftTrees(token_ids, parents, depths.expand(batch, -1), log_probs, [size] * batch)
    return prune(trees, 1 + num_nodes)


def _children(
    logits: Tensor, log_probs: Tensor, num_nodes: int, vocabulary: Tensor | None
) -> _Level:
    """Return the likeliest children of F nodes, at most `num_nodes` for each sequence.

    logits [B, F, V] of the children, log_probs [B, F] of the parents' paths; `vocabulary` as in
    `grow_trees`.
    """
    width = min(num_nodes, logits.shape[-1])
    logits = logits.float()
    top = logits.topk(width, dim=-1)
    weights = top.values - logits.logsumexp(-1, keepdim=True) + log_probs.unsqueeze(-1)
    best = weights.flatten(1).topk(min(num_nodes, weights.flatten(1).shape[1]), dim=1)
    entries = top.indices.flatten(1).gather(1, best.indices)
    return _Level(
        entries if vocabulary is None else vocabulary[entries], best.indices // width, best.values
    )


def grow_trees(
    root_token_ids: Tensor,
    root_logits: Tensor,
    expand: Expand,
    options: TreeOptions,
    *,
    least_gain: float | None,
    num_nodes: int | None = None,
    vocabulary: Tensor | None = None,
) -> DraftTrees:
    """Grow each sequence's tree of the `num_nodes` likeliest nodes in `options.depth` levels of
    drafting.

    root_token_ids [B], root_logits [B, V]. Path probabilities only shrink along a path, so the
    ancestors of a chosen node are chosen too, and a node outside the best so far is not expanded,
    because none of its descendants can be among the best at the end. A sequence stops where a level
    adds less than `least_gain` to the expected number of accepted tokens, and a level is narrowed
    to the nodes worth expanding, which costs one host sync per level; None: every level runs at
    full width (fixed shapes). Without `num_nodes` they are `options.most_nodes`. `vocabulary` [V]
    holds the token ids of a reduced draft's logits.
    """
    num_nodes = options.most_nodes if num_nodes is None else num_nodes
    root_log_probs = root_logits.new_zeros(len(root_logits), 1, dtype=torch.float32)
    level = _children(root_logits.unsqueeze(1), root_log_probs, num_nodes, vocabulary)
    roots = root_token_ids.unsqueeze(1)
    pool = [_Level(roots, torch.full_like(roots, -1), root_log_probs)]
    order = None
    _append(pool, level, order)
    mask = torch.zeros(len(root_logits), 0, 0, dtype=torch.bool, device=root_logits.device)
    if least_gain is not None:
        stopped = torch.zeros_like(root_log_probs, dtype=torch.bool)
        expected = _expected_accepted(pool, num_nodes)
    for depth in range(1, options.depth):
        if least_gain is not None:
            order = _live(pool, num_nodes)
            if order.shape[1] == 0:
                break
            level = level.at(order)
        mask = _frontier_mask(mask, level.indices)
        logits = expand(level.token_ids, level.indices, mask, depth)
        weights = (
            level.log_probs if least_gain is None else level.log_probs.masked_fill(stopped, -inf)
        )
        level = _children(logits, weights, num_nodes, vocabulary)
        _append(pool, level, order)
        if least_gain is not None:
            before = expected
            expected = _expected_accepted(pool, num_nodes)
            stopped |= (expected - before).unsqueeze(1) < least_gain
            if bool(stopped.all()):
                break
    return _best_of(pool, num_nodes)


def _frontier_mask(seen: Tensor, indices: Tensor) -> Tensor:
    """Make the mask [B, F, M + F]: a node sees what its parent saw (`seen` [B, F of before, M]),
    and itself.
    """
    batch, width = indices.shape
    own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)
    if seen.shape[1] == 0:
        return own
    return torch.cat([seen.gather(1, indices.unsqueeze(2).expand(-1, -1, seen.shape[2])), own], 2)


def prune(trees: DraftTrees, num_nodes: int) -> DraftTrees:
    """Keep the `num_nodes` likeliest nodes of each tree, including its root; smaller trees are
    returned unchanged.

    Path probabilities never grow towards the leaves, parents come first, and of two equal nodes the
    earlier one is kept. So the ancestors of a kept node are kept too.
    """
    if trees.num_nodes <= num_nodes:
        return trees
    kept = (
        trees.log_probs.sort(dim=1, descending=True, stable=True)
        .indices[:, :num_nodes]
        .sort(dim=1)
        .values
    )
    numbers = torch.zeros_like(trees.parents)
    numbers.scatter_(1, kept, torch.arange(1, num_nodes + 1, device=kept.device).expand_as(kept))
    numbers = pad(numbers, (1, 0))  # place 0 is that of parent -1
    parents = numbers.gather(1, trees.parents.gather(1, kept) + 1) - 1
    token_ids, depths, log_probs = (
        each.gather(1, kept) for each in (trees.token_ids, trees.depths, trees.log_probs)
    )
    return DraftTrees(
        token_ids, parents, depths, log_probs, [min(size, num_nodes) for size in trees.sizes]
    )


def verify(
    token_ids: Tensor, parents: Tensor, chosen: Tensor, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Follow the target's choices from each root for as long as the tree contains them, `max_depth`
    levels at most.

    token_ids and parents [B, N] are those of the trees; `chosen` [B, N] is the target's token after
    each node. The host is not asked. Padding, which has no parent, is never accepted.

    Returns the accepted nodes [B, W] int64, the root first (behind them place i holds node i), and
    the tokens [B, W] int64 that the step decides, the target's after each accepted node: accepted
    draft tokens, one of its own, and -1 behind them. W is the length of the longest possible path.
    """
    batch, num_nodes = parents.shape
    numbers = torch.arange(num_nodes + 1, device=parents.device)
    # node n has place n + 1; place 0 is no node, and nothing is chosen after it
    places = parents + 1
    choices = pad(chosen, (1, 0), value=-1)
    is_chosen = choices.gather(1, places) == token_ids
    child = places.new_zeros(batch, num_nodes + 1).scatter_(
        1, places * is_chosen, numbers[1:] * is_chosen
    )
    path = [numbers[1:2].expand(batch, 1)]
    for _ in range(min(max_depth, num_nodes - 1)):
        path.append(child.gather(1, path[-1]))
    steps = torch.cat(path, 1)
    return (steps - 1).where(steps > 0, numbers[: len(path)]), choices.gather(1, steps)


@dataclass(frozen=True)
class Decided:
    """Holds what the target decided for B sequences, for the draft to read: in a step, or in
    several.

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
        padded = upload(torch.tensor(rows), features[0].device)
        return cls(token_ids, padded, pad_sequence(list(features), batch_first=True))


class Drafter:
    """Proposes trees; by itself nothing, so that all steps are plain. A `slot` is a sequence's
    place in the batch.

    For each slot the engine calls `admit`, `prefill` chunk by chunk, `select`, `read`,
    `read_selected` and `absorb` of the first root; then, in rounds, `propose`, `read`, `select` and
    `read_selected` if the cache policy says so, and `absorb`; at the end `release`. While a slot
    pauses it calls `glance` and `read`, and absorbs what was read meanwhile when it goes on.
    """

    hidden_layers: tuple[int, ...] | None = None
    """The target's layers, ascending from 0, whose concatenated outputs are a position's features
    [.., F].

    Without layers the features are the last hidden state, after the final norm; None: it reads no
    features (F = 0).
    """
    num_levels: int = 0
    """The largest number of tree levels; the acceptance histogram has one entry more."""
    drafted: Mapping[int, set[int]] | None = None
    """By slot, the first tokens that a network proposed for this step; None: its trees have no
    others.
    """

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False if there is none now."""
        return True

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read the next chunk of the prompt: token_ids [T] and the target's features [T, F] at
        them.
        """

    def select(self, slot: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S], ascending and on the host, and what
        `absorb` adds later.
        """

    def read_selected(self, slots: Sequence[int]) -> int:
        """Read the selected tokens that the draft has no rows for; return their number."""
        return 0

    def read(self, slot: int, token_ids: list[int]) -> None:
        """Note newly decided tokens."""

    def glance(
        self, slots: Sequence[int], num_nodes: int, least_probability: float
    ) -> DraftTrees | None:
        """Propose trees of what `read` has noted alone, which takes next to no time; None if that
        is nothing.

        Paths that are less likely than asked are left out.
        """
        return None

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Let a network read what was decided for these slots."""

    def propose(self, slots: Sequence[int], num_nodes: int | None = None) -> DraftTrees:
        """Propose a tree of up to `num_nodes` nodes behind each slot's root; None: of as many as
        configured. Asked only where there are levels.
        """
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Free the slot."""
