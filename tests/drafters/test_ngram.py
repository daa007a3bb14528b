"""N-gram drafts: matches of a text's end, trees, and what they bring to the engine."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.speculation import Adaptive
from specextend.decoding.tree import DraftTrees, TreeNode
from specextend.drafters.ngram import LONGEST, MOST, Match, NgramState, SuffixIndex, children_of
from specextend.stats import DecodingStats
from tests.reference_outputs import tokens_of
from tests.test_adaptive import NUM_NODES, ScriptedCosts
from tests.tiny_models import engine_with, of_length, tiny_config, tiny_engine

LENGTHS = (300, 37, 129)
NEW = 60
TOKENS = st.integers(0, 3)


def searched(text, most=MOST):
    """By definition: for every earlier place, the tokens before it that are also the last ones of the text."""
    found = []
    for position in range(1, len(text)):
        pairs = zip(reversed(text[:position]), reversed(text), strict=False)
        length = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), position)
        if length:
            found.append(Match(min(length, LONGEST), position))
    return sorted(found, reverse=True)[:most]


@given(st.lists(st.lists(TOKENS, max_size=3 * LONGEST), max_size=4), st.lists(TOKENS, max_size=60))
def test_matches_of_a_text_that_grows_are_found_by_a_search(chunks, output):
    """Only the last tokens of a chunk are matched; a match across the border of two must not be cut."""
    index = SuffixIndex()
    text = []
    for chunk in [*chunks, *([token_id] for token_id in output)]:
        index.extend(chunk)
        text += chunk
        assert index.matches() == searched(text)
    assert index.token_ids == text


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
    return children_of(tree)


@st.composite
def drafts(draw):
    """A draft's tree of few tokens, without equal siblings."""
    grown = {}
    for token_id, number in draw(st.lists(st.tuples(TOKENS, st.integers(0, 5)), max_size=12)):
        parent = min(number, len(grown))
        grown.setdefault((token_id, parent), (token_id, parent, draw(st.floats(0.01, 0.25))))
    return draft_tree(*grown.values())


@given(
    prompt=st.lists(TOKENS, max_size=40),
    output=st.lists(TOKENS, min_size=1, max_size=20),
    room=st.integers(0, 9),
    draft=drafts(),
    num_drafts=st.integers(1, 12),
    depth=st.integers(1, 6),
)
def test_a_merged_tree_keeps_its_budget_and_is_a_tree(prompt, output, room, draft, num_drafts, depth):
    """The engine relies on it: parents first, no probability above the parent's, no path twice.

    A tree that the output cannot take would be verified in vain, and reach past the context.
    """
    state = NgramState(len(prompt), len(output) + room)
    state.read(prompt)
    for token_id in output:
        state.read([token_id])
        nodes = state.propose(num_drafts, depth, draft)
    assert len(nodes) <= 1 + num_drafts
    assert (nodes[0].token_id, nodes[0].parent) == (output[-1], -1)
    for number, node in enumerate(nodes[1:], start=1):
        parent = nodes[node.parent]
        assert node.parent < number
        assert node.depth == parent.depth + 1 <= min(depth, room - 1)
        assert node.log_prob < parent.log_prob
    assert len(paths(nodes)) == len(nodes) - 1
    [tree] = DraftTrees.pad([nodes], torch.device("cpu"))
    assert (tree.log_probs.diff() <= 0).all(), "best first"


def test_a_merged_tree_holds_the_best_of_both():
    """The draft's likely first token, the copy, and not the draft's unlikely one."""
    state = NgramState(11, 1000)
    state.read([*range(10, 20), 0, 10, 11, 12])
    found = paths(state.propose(4, 16, draft_tree((70, 0, 0.6), (71, 1, 0.9), (72, 0, 0.02))))
    assert found == {(13,), (13, 14), (70,), (70, 71)}


@pytest.fixture(scope="module")
def plain(looping_pair):
    """What plain decoding gives."""
    return run(tiny_engine(looping_pair, "ngram", decoding__mode="autoregressive"))[0]


def run(engine):
    completions = [*engine.generate([of_length(length, NEW) for length in LENGTHS])]
    total = DecodingStats()
    for completion in completions:
        total.add(completion.stats)
    return tokens_of(completions), total


@pytest.mark.parametrize(
    "draft, batch, depth, policy",
    [("ngram", 1, 2, "retrieval"), ("merged-bad", 1, 2, "retrieval"), ("merged-bad", 3, 1, "full")],
)
def test_text_that_repeats_itself_is_copied_deep(draft, batch, depth, policy, looping_pair, plain):
    """Paths deeper than a model's tree are packed, and a batch absorbs runs of very different lengths.

    A draft runs a batch padded to its longest run, for which a draft of one node has room in its cache, too.
    """
    changes = {"decoding__max_batch_size": batch, "cache__policy": policy, "tree__nodes": 14, "tree__depth": depth}
    outputs, stats = run(tiny_engine(looping_pair, draft, **changes))
    assert outputs == plain
    assert stats.num_output_tokens > 2 * (stats.num_spec_steps + stats.num_plain_steps)
    assert len(stats.acceptance_histogram) == 17
    assert sum(stats.acceptance_histogram[10:]) > 0
    assert stats.num_network_steps == (draft != "ngram") * stats.num_spec_steps
    copied = stats.num_spec_steps - stats.acceptance_histogram[0]
    assert stats.num_first_accepted < 0.3 * stats.num_spec_steps < copied, "a copy is no hit of a bad draft"


@pytest.mark.parametrize("batch", [1, 3])
def test_what_repeats_itself_is_copied_while_a_draft_pauses(batch, looping_pair, plain):
    """A draft that costs five plain steps is given up, but copies cost nothing: they go on, and are counted."""
    adaptive = Adaptive(ScriptedCosts(lambda rows: 1 + rows / 20, lambda: 5.0), NUM_NODES)
    config = tiny_config(looping_pair, "merged-bad", decoding__max_batch_size=batch, attention__tree="dense")
    outputs, stats = run(engine_with(config, adaptive=adaptive))
    assert outputs == plain
    assert stats.num_fallbacks >= 1
    assert stats.num_draft_tokens > 2 * NUM_NODES, "more than the tries at the start"
    assert stats.num_accepted_tokens > stats.num_spec_steps > 10
    assert 0 < stats.num_network_steps < stats.num_spec_steps, "n-grams alone say nothing of the draft"
