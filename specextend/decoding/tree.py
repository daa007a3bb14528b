"""Draft trees: their form, growth (OPT-Tree, arXiv 2406.17276), pruning and verification.

`Drafter` is the interface of drafts. The root of a tree is a node, and not a draft token: a tree of
`N` nodes has `N - 1` draft tokens.

More shapes: `F` frontier nodes, `P` pooled candidates, `M` expanded nodes.
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
"""Least log probability of a path, also for NaN, which would sort before the root."""
_PADDING = (0, -1, 0, -inf)


class TreeNode(NamedTuple):
    """A node of a tree, on the host."""

    parent: int
    token_id: int
    depth: int
    log_prob: float


@dataclass(frozen=True)
class DraftTrees:
    """Trees for B sequences, padded to N nodes. A single tree has no batch dimension.

    Node 0 is the root, with parent -1. Parents precede their children.
    """

    token_ids: Tensor
    """[B, N] int64; padding 0."""
    parents: Tensor
    """[B, N] int64; padding -1."""
    depths: Tensor
    """[B, N] int64, 0 for the root; padding 0."""
    log_probs: Tensor
    """[B, N] fp32, of the draft's path from the root; padding -inf."""
    sizes: list[int]
    """[B] nodes of each tree."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor], sizes: list[int]) -> DraftTrees:
        """Make trees from `tensors`."""
        token_ids, parents, depths, log_probs = tensors
        return cls(token_ids, parents, depths, log_probs, sizes)

    @classmethod
    def pad(cls, batch: Sequence[Sequence[TreeNode]], device: torch.device) -> DraftTrees:
        """Make trees from lists of nodes."""
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
        """Return the trees padded to at least `num_nodes`."""
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
        """Return the likeliest path of each tree."""
        return DraftTrees.pad([*map(_likeliest_path, self.nodes())], self.token_ids.device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids, parents, depths and log probabilities."""
        return self.token_ids, self.parents, self.depths, self.log_probs

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.token_ids.shape[1]

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[DraftTrees]:
        """Yield each tree as [N] tensors without padding."""
        for b, n in enumerate(self.sizes):
            yield DraftTrees.of((each[b, :n] for each in self.tensors), [n])


def _likeliest_path(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    path = [nodes[0]]
    place = 0
    while children := [at for at, node in enumerate(nodes) if node.parent == place]:
        place = max(children, key=lambda at: nodes[at].log_prob)
        path.append(nodes[place]._replace(parent=len(path) - 1))
    return path


def roots_only(token_ids: Sequence[int], device: torch.device) -> DraftTrees:
    """Make the trees of a plain step: the last tokens [B] without draft tokens."""
    roots = upload(torch.tensor(token_ids), device).unsqueeze(1)
    zeros = torch.zeros_like(roots)
    return DraftTrees(roots, zeros - 1, zeros, zeros.float(), [1] * len(token_ids))


def among_roots(trees: DraftTrees, places: Sequence[int], token_ids: Sequence[int]) -> DraftTrees:
    """Put trees at places of a batch with last tokens `token_ids`; the rest are roots."""
    roots = roots_only(token_ids, trees.token_ids.device).padded(trees.num_nodes)
    index = upload(torch.tensor(places), trees.token_ids.device)
    pairs = zip(roots.tensors, trees.tensors, strict=True)
    sizes = dict(zip(places, trees.sizes, strict=True))
    return DraftTrees.of(
        (every.index_copy(0, index, each) for every, each in pairs),
        [sizes.get(place, 1) for place in range(len(token_ids))],
    )


def tree_mask(parents: Tensor, max_depth: int) -> Tensor:
    """Return the mask [B, N, N] bool of parents [B, N]: a node sees itself and its ancestors."""
    batch, num_nodes = parents.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    parents = parents.clamp(min=0)
    ancestors = parents
    for _ in range(min(max_depth, num_nodes - 1)):
        mask.scatter_(2, ancestors.unsqueeze(2), True)
        ancestors = parents.gather(1, ancestors)
    return mask


Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(token_ids [B, F], parent_indices [B, F], mask [B, F, M], depth) -> logits [B, F, V] of children.

`parent_indices` refer to the nodes of the previous call. The last F of the M nodes are new.
"""


class _Level(NamedTuple):
    """Nodes [B, n] of a depth."""

    token_ids: Tensor
    indices: Tensor
    log_probs: Tensor

    def at(self, order: Tensor) -> _Level:
        return _Level(*(each.gather(1, order) for each in self))


# A list of levels from the root on lets a stable sort prefer shallow nodes.


def _append(levels: list[_Level], level: _Level, order: Tensor | None) -> None:
    """Append the children of the deepest level's nodes at places `order` [B, F], or of all."""
    parents = level.indices if order is None else order.gather(1, level.indices)
    first = sum(each.token_ids.shape[1] for each in levels[:-1])
    levels.append(level._replace(indices=parents + first))


def _live(levels: list[_Level], num_drafts: int) -> Tensor:
    """Return the places [B, F] of the deepest level's nodes among the best, likeliest first."""
    log_probs = torch.cat([each.log_probs for each in levels], 1)
    best = log_probs.sort(dim=1, descending=True, stable=True).indices[:, : 1 + num_drafts]
    live = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(1, best, True)
    live = live[:, -levels[-1].token_ids.shape[1] :]
    order = live.int().sort(dim=1, descending=True, stable=True).indices
    return order[:, : int(live.sum(1).max())]


def _expected_accepted(levels: list[_Level], num_drafts: int) -> Tensor:
    log_probs = torch.cat([each.log_probs for each in levels[1:]], 1)
    return log_probs.topk(min(num_drafts, log_probs.shape[1]), dim=1).values.exp().sum(1)


def _best_of(levels: list[_Level], num_drafts: int) -> DraftTrees:
    numbers = torch.arange(len(levels), device=levels[0].indices.device).split(1)
    pairs = zip(numbers, levels, strict=True)
    depths = torch.cat([number.expand(each.indices.shape[1]) for number, each in pairs])
    token_ids, parents, log_probs = (torch.cat(each, 1) for each in zip(*levels, strict=True))
    log_probs = log_probs.nan_to_num(nan=_NEVER).clamp(min=_NEVER)
    batch, size = parents.shape
    trees = DraftTrees(token_ids, parents, depths.expand(batch, -1), log_probs, [size] * batch)
    return prune(trees, 1 + num_drafts)


def _children(
    logits: Tensor, log_probs: Tensor, num_drafts: int, vocabulary: Tensor | None
) -> _Level:
    """Return the likeliest children, by their logits [B, F, V] and the paths' log_probs [B, F]."""
    width = min(num_drafts, logits.shape[-1])
    logits = logits.float()
    top = logits.topk(width, dim=-1)
    weights = top.values - logits.logsumexp(-1, keepdim=True) + log_probs.unsqueeze(-1)
    best = weights.flatten(1).topk(min(num_drafts, weights.flatten(1).shape[1]), dim=1)
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
    num_drafts: int | None = None,
    vocabulary: Tensor | None = None,
) -> DraftTrees:
    """Grow trees of the likeliest nodes, one level of drafting after the other.

    Path probabilities shrink along a path. So the ancestors of a chosen node are chosen too, and
    only nodes among the best so far are expanded.

    Args:
        root_token_ids: Roots [B].
        root_logits: Logits [B, V] of their children.
        least_gain: Expected accepted tokens that a level must add for a sequence to go on. Each
            level is narrowed to live nodes, with a host sync. None: levels have the full width
            (fixed shapes).
        num_drafts: Draft tokens; None: `options.most_drafts`.
        vocabulary: Token ids [V] of the logits of a reduced draft.
    """
    num_drafts = options.most_drafts if num_drafts is None else num_drafts
    root_log_probs = root_logits.new_zeros(len(root_logits), 1, dtype=torch.float32)
    level = _children(root_logits.unsqueeze(1), root_log_probs, num_drafts, vocabulary)
    roots = root_token_ids.unsqueeze(1)
    pool = [_Level(roots, torch.full_like(roots, -1), root_log_probs)]
    order = None
    _append(pool, level, order)
    mask = torch.zeros(len(root_logits), 0, 0, dtype=torch.bool, device=root_logits.device)
    if least_gain is not None:
        stopped = torch.zeros_like(root_log_probs, dtype=torch.bool)
        expected = _expected_accepted(pool, num_drafts)
    for depth in range(1, options.depth):
        if least_gain is not None:
            order = _live(pool, num_drafts)
            if order.shape[1] == 0:
                break
            level = level.at(order)
        mask = _frontier_mask(mask, level.indices)
        logits = expand(level.token_ids, level.indices, mask, depth)
        weights = (
            level.log_probs if least_gain is None else level.log_probs.masked_fill(stopped, -inf)
        )
        level = _children(logits, weights, num_drafts, vocabulary)
        _append(pool, level, order)
        if least_gain is not None:
            before = expected
            expected = _expected_accepted(pool, num_drafts)
            stopped |= (expected - before).unsqueeze(1) < least_gain
            if bool(stopped.all()):
                break
    return _best_of(pool, num_drafts)


def _frontier_mask(seen: Tensor, indices: Tensor) -> Tensor:
    """Extend the mask [B, F, M] of a level to the next level's [B, F, M + F]."""
    batch, width = indices.shape
    own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)
    if seen.shape[1] == 0:
        return own
    return torch.cat([seen.gather(1, indices.unsqueeze(2).expand(-1, -1, seen.shape[2])), own], 2)


def prune(trees: DraftTrees, num_nodes: int) -> DraftTrees:
    """Keep the `num_nodes` likeliest nodes of each tree, root included.

    Path probabilities never grow towards the leaves, and the earlier of equal nodes is kept. So the
    ancestors of a kept node are kept too.
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
    """Follow the target's choices from each root through the tree, without asking the host.

    Args:
        token_ids: Tokens [B, N] of the trees.
        parents: Parents [B, N]. Padding has none, so it is never accepted.
        chosen: The target's token [B, N] after each node.
        max_depth: Levels of the deepest path.

    Returns:
        Accepted nodes [B, W] int64 from the root on; place i after them holds node i.
        Decided tokens [B, W] int64: accepted draft tokens, one more of the target, then -1.
    """
    batch, num_nodes = parents.shape
    numbers = torch.arange(num_nodes + 1, device=parents.device)
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
    """Decided tokens of B sequences, T at most, for the draft to read."""

    token_ids: Sequence[list[int]]
    """New tokens of each sequence, the new root last."""
    padded: Tensor
    """[B, T] int64 on the device; padding -1."""
    features: Tensor
    """[B, T, F] features of the target before each token."""

    @classmethod
    def pad(cls, token_ids: Sequence[list[int]], features: Sequence[Tensor]) -> Decided:
        """Pad the tokens and the features [n, F] of each sequence."""
        width = max(len(new) for new in token_ids)
        rows = [new + [-1] * (width - len(new)) for new in token_ids]
        padded = upload(torch.tensor(rows), features[0].device)
        return cls(token_ids, padded, pad_sequence(list(features), batch_first=True))


class Drafter:
    """The interface of drafts. This base class proposes nothing, so all steps are plain.

    A `slot` is the place of a sequence in the batch. The engine calls, for each slot:

    1. `admit`, then `prefill` for each chunk of the prompt;
    2. `select`, `read`, `read_selected` and `absorb` for the first root;
    3. in each step `propose`, `read`, if a retrieval is due `select` and `read_selected`, `absorb`;
    4. in a pause `glance` and `read`, and `absorb` for all of it afterwards;
    5. `release`.
    """

    hidden_layers: tuple[int, ...] | None = None
    """Layers of the target, ascending, with the outputs for the features.

    Empty: features are the last hidden state after the final norm. None: no features (F = 0).
    """
    num_levels: int = 0
    drafted: Mapping[int, set[int]] | None = None
    """First tokens of a network's proposals by slot; None: of all proposals."""

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False without room."""
        return True

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read a chunk of the prompt: tokens [T] and the target's features [T, F]."""

    def select(self, slot: int, positions: Tensor) -> None:
        """Show the draft these committed positions [S], ascending and on the host.

        Tokens of later calls of `absorb` are visible too.
        """

    def read_selected(self, slots: Sequence[int]) -> int:
        """Read selected tokens without cache rows; return their number."""
        return 0

    def read(self, slot: int, token_ids: list[int]) -> None:
        """Note decided tokens."""

    def glance(
        self, slots: Sequence[int], num_drafts: int, least_probability: float
    ) -> DraftTrees | None:
        """Propose trees from noted tokens, in next to no time; None without proposals.

        Nodes have at least `least_probability`.
        """
        return None

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Let a network read decided tokens."""

    def propose(self, slots: Sequence[int], num_drafts: int | None = None) -> DraftTrees:
        """Propose trees of up to `num_drafts` draft tokens, or as configured.

        Called only if `num_levels` is above 0.
        """
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Free the slot."""
