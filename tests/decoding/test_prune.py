"""Cutting trees: what is left is a tree, of the likeliest nodes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.tree import DraftTree, prune


@st.composite
def trees(draw) -> DraftTree:
    """Parents first, log probabilities that never grow along a path, many of them equal."""
    parents, depths, log_probs = [-1], [0], [0.0]
    for node in range(1, draw(st.integers(1, 20))):
        parent = draw(st.integers(0, node - 1))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        log_probs.append(log_probs[parent] - draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])))
    token_ids = torch.arange(100, 100 + len(parents))
    return DraftTree(token_ids, torch.tensor(parents), torch.tensor(depths), torch.tensor(log_probs))


def path_of(tree: DraftTree, node: int) -> list[int]:
    """Token ids from the root to `node`."""
    path = []
    while node >= 0:
        path.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return path[::-1]


@given(trees(), st.integers(1, 22))
def test_the_likeliest_nodes_stay_with_their_ancestors(tree, num_nodes):
    """A node whose parent was cut would be verified behind another prefix than its own."""
    pruned = prune(tree, num_nodes)
    assert len(pruned.token_ids) == min(num_nodes, len(tree.token_ids))
    best = tree.log_probs.sort(descending=True).values[:num_nodes]
    assert torch.equal(pruned.log_probs.sort(descending=True).values, best)
    assert (pruned.token_ids[0], pruned.parents[0]) == (100, -1)
    whole = {path[-1]: path for path in (path_of(tree, node) for node in range(len(tree.token_ids)))}
    for node, parent in enumerate(pruned.parents.tolist()):
        assert parent < node, "parents come first"
        path = path_of(pruned, node)
        assert path == whole[path[-1]]
        assert pruned.depths[node] == len(path) - 1


def test_a_tree_that_is_small_enough_is_left_alone():
    tree = DraftTree(torch.tensor([5, 6]), torch.tensor([-1, 0]), torch.tensor([0, 1]), torch.tensor([0.0, -1.0]))
    assert prune(tree, 2) is tree
    assert prune(tree, 1).token_ids.tolist() == [5]
