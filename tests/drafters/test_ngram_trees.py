"""Trees of n-gram drafts: what they hold, and how they learn from what the target said."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.tree import DraftTrees, TreeNode
from specextend.drafters.ngram import NgramState, children_of

CPU = torch.device("cpu")
TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def state_of(prompt, output, max_new_tokens=1000):
    state = NgramState(len(prompt), max_new_tokens)
    state.read(prompt)
    state.read(output)
    return state


def paths(nodes):
    """Every path from the root, without the root."""
    by_number = [()]
    for node in nodes[1:]:
        by_number.append((*by_number[node.parent], node.token_id))
    return set(by_number[1:])


def draft_tree(*nodes):
    """Node 0 is the root; others as (token, parent, probability after it)."""
    tree = [TreeNode(-1, 0, 0, 0.0)]
    for token_id, number, probability in nodes:
        parent = tree[number]
        tree.append(TreeNode(number, token_id, parent.depth + 1, parent.log_prob + math.log(probability)))
    return tree


@st.composite
def proposals(draw):
    """A text of few tokens, and a draft's tree behind it."""
    tokens = st.integers(0, 4)
    nodes = draw(st.lists(st.tuples(tokens, st.integers(0, 5), st.floats(0.01, 1.0)), max_size=12))
    grown = {}
    for number, (token_id, parent, probability) in enumerate(nodes):
        parent = min(parent, number)
        siblings = [other for other in grown.values() if other[1] == parent]
        if parent <= len(grown) and all(token_id != other[0] for other in siblings):
            left = 1 - sum(other[2] for other in siblings)
            grown[(token_id, parent)] = (token_id, parent, max(0.001, probability * left))
    return draw(st.lists(tokens, max_size=40)), draw(st.lists(tokens, min_size=1, max_size=20)), [*grown.values()]


@given(proposals(), st.integers(1, 12), st.integers(1, 6))
def test_a_merged_tree_keeps_its_budget_and_is_a_tree(proposal, num_drafts, depth):
    """The engine relies on it: parents first, no probability above the parent's, no path twice."""
    prompt, output, drafted = proposal
    state = NgramState(len(prompt), 1000)
    state.read(prompt)
    for token_id in output:
        state.read([token_id])
        nodes = state.propose(num_drafts, depth, children_of(draft_tree(*drafted)))
    assert len(nodes) <= 1 + num_drafts
    assert nodes[0].token_id == output[-1]
    assert nodes[0].parent == -1
    for number, node in enumerate(nodes[1:], start=1):
        parent = nodes[node.parent]
        assert node.parent < number
        assert node.depth == parent.depth + 1 <= depth
        assert node.log_prob < parent.log_prob
    assert len(paths(nodes)) == len(nodes) - 1
    [tree] = DraftTrees.pad([nodes], CPU)
    assert (tree.log_probs.diff() <= 0).all(), "best first"


def test_a_merged_tree_holds_the_best_of_both():
    """The draft's likely first token, the copy, and not the draft's unlikely one."""
    state = state_of([*TEXT, 0], [10, 11, 12])
    found = paths(state.propose(4, 16, children_of(draft_tree((70, 0, 0.6), (71, 1, 0.9), (72, 0, 0.02)))))
    assert found == {(13,), (13, 14), (70,), (70, 71)}
