"""Verification follows the target's choices for as long as the draft contains them, for a batch of trees at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.tree import verify


def follow(token_ids: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], int]:
    """The path and the token after it, for one tree, with a dictionary of its edges."""
    child = {edge: node for node, edge in enumerate(zip(parents, token_ids, strict=True))}
    path = [0]
    while (node := child.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(node)
    return path, chosen[path[-1]]


@st.composite
def batches(draw) -> tuple[list[list[tuple[int, int, int]]], int]:
    """Trees of (parent, token id, chosen token id), no edge twice; and the number of nodes they are padded to."""
    batch = []
    for _ in range(draw(st.integers(1, 4))):
        edges = [(-1, draw(st.integers(0, 3)))]
        for _ in range(draw(st.integers(0, 11))):
            edge = (draw(st.integers(0, len(edges) - 1)), draw(st.integers(0, 3)))
            edges += [] if edge in edges else [edge]
        batch.append([(*edge, draw(st.integers(0, 3))) for edge in edges])
    return batch, max(len(tree) for tree in batch) + draw(st.integers(0, 2))


@given(batches())
def test_a_batch_is_verified_as_each_tree_alone(drawn):
    """A path, the token after it and the columns behind both are what a walk over the edges finds, without the host."""
    batch, num_nodes = drawn
    padded = [[*tree, *[(-1, 0, 0)] * (num_nodes - len(tree))] for tree in batch]
    parents, token_ids, chosen = torch.tensor(padded).unbind(2)
    paths, rows = verify(token_ids, parents, chosen, num_nodes)
    for tree, path, decided in zip(batch, paths.tolist(), rows.tolist(), strict=True):
        columns = [list(column) for column in zip(*tree, strict=True)]
        expected, bonus_token_id = follow(columns[1], columns[0], columns[2])
        assert path == [*expected, *range(len(expected), num_nodes)]
        kept = [*(columns[1][node] for node in expected[1:]), bonus_token_id]
        assert decided == [*kept, *[-1] * (num_nodes - len(kept))]
