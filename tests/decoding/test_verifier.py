"""Verification on plain lists: the path follows the target's choice for as long as the draft holds it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.tree import Verdict, verify

#        0
#      /   \
#     1(7)  2(8)
#    /  \     \
#  3(9) 4(7)  5(9)
TOKEN_IDS = [5, 7, 8, 9, 7, 9]
PARENTS = [-1, 0, 0, 1, 1, 2]


def test_nothing_accepted_gives_the_targets_own_token():
    """A useless draft still yields one token a step."""
    assert verify(TOKEN_IDS, PARENTS, [3, 7, 7, 7, 7, 7]) == Verdict([0], 3)


def test_a_root_alone_is_a_plain_step():
    assert verify([5], [-1], [9]) == Verdict([0], 9)


def test_a_whole_path_is_accepted_with_a_bonus_token():
    assert verify(TOKEN_IDS, PARENTS, [7, 7, 0, 0, 1, 0]) == Verdict([0, 1, 4], 1)


def test_the_path_may_take_the_less_likely_branch():
    assert verify(TOKEN_IDS, PARENTS, [8, 0, 9, 0, 0, 2]) == Verdict([0, 2, 5], 2)


def test_a_token_that_stands_under_another_parent_is_not_accepted():
    """9 follows 7 and 8 in this tree; the target's 9 after the root is neither."""
    assert verify(TOKEN_IDS, PARENTS, [9, 9, 9, 9, 9, 9]) == Verdict([0], 9)


def test_a_child_with_its_parents_token_is_told_apart():
    """7 after 7: edges are (parent, token), not tokens."""
    assert verify(TOKEN_IDS, PARENTS, [7, 7, 0, 0, 7, 0]) == Verdict([0, 1, 4], 7)


def test_the_roots_own_token_is_no_edge():
    """The root has parent -1: no node may be taken for its parent."""
    assert verify([5, 5], [-1, 0], [5, 5]) == Verdict([0, 1], 5)


@given(st.data())
def test_verification_is_decoding_with_the_target(data):
    """Accepted tokens and bonus token are what the target alone would have said, as far as the tree reaches."""
    num_nodes = data.draw(st.integers(1, 12))
    nodes: list[tuple[int, int]] = [(-1, 0)]
    for n in range(1, num_nodes):
        edge = (data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 3)))
        if edge not in nodes:
            nodes.append(edge)
    parents, token_ids = (list(column) for column in zip(*nodes, strict=True))
    chosen = [data.draw(st.integers(0, 3)) for _ in nodes]
    verdict = verify(token_ids, parents, chosen)
    for parent, node in zip(verdict.path, verdict.path[1:], strict=False):
        assert (parents[node], token_ids[node]) == (parent, chosen[parent])
    assert verdict.bonus_token_id == chosen[verdict.path[-1]]
    assert (verdict.path[-1], verdict.bonus_token_id) not in nodes[1:], "the path goes on as long as it can"
