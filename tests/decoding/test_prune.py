"""Cutting trees: what is left of each is a tree, of its likeliest nodes."""

from __future__ import annotations

from math import inf

import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.tree import DraftTree, DraftTrees, prune


def padded(columns: list[list[list[float]]], padding: float, dtype: torch.dtype) -> torch.Tensor:
    """A column of each tree, padded to the longest."""
    width = max(len(column) for column in columns)
    return torch.tensor([[*column, *[padding] * (width - len(column))] for column in columns], dtype=dtype)


@st.composite
def batches(draw) -> DraftTrees:
    """Parents first, log probabilities that never grow along a path, many of them equal or impossible."""
    parents, depths, log_probs = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        parents.append([-1])
        depths.append([0])
        log_probs.append([0.0])
        for node in range(1, draw(st.integers(1, 20))):
            parent = draw(st.integers(0, node - 1))
            parents[-1].append(parent)
            depths[-1].append(depths[-1][parent] + 1)
            log_probs[-1].append(log_probs[-1][parent] - draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, inf])))
    token_ids = [list(range(100, 100 + len(each))) for each in parents]
    whole = (padded(token_ids, 0, torch.int64), padded(parents, -1, torch.int64), padded(depths, 0, torch.int64))
    return DraftTrees(*whole, padded(log_probs, -inf, torch.float32), [len(each) for each in parents])


def path_of(tree: DraftTree, node: int) -> list[int]:
    """Token ids from the root to `node`."""
    path = []
    while node >= 0:
        path.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return path[::-1]


@given(batches(), st.integers(1, 22))
def test_the_likeliest_nodes_stay_with_their_ancestors(trees, num_nodes):
    """A node whose parent was cut would be verified behind another prefix than its own."""
    pruned = prune(trees, num_nodes)
    assert pruned.num_nodes == max(pruned.sizes)
    for tree, left in zip(trees, pruned, strict=True):
        assert len(left.token_ids) == min(num_nodes, len(tree.token_ids))
        best = tree.log_probs.sort(descending=True).values[:num_nodes]
        assert torch.equal(left.log_probs.sort(descending=True).values, best)
        assert (left.token_ids[0], left.parents[0]) == (100, -1)
        whole = {path[-1]: path for path in (path_of(tree, node) for node in range(len(tree.token_ids)))}
        for node, parent in enumerate(left.parents.tolist()):
            assert parent < node, "parents come first"
            path = path_of(left, node)
            assert path == whole[path[-1]]
            assert left.depths[node] == len(path) - 1

    for b, size in enumerate(pruned.sizes):
        assert (pruned.parents[b, size:] == -1).all(), "padding has no parent, so it is never accepted"
        assert (pruned.log_probs[b, size:] == -inf).all()
