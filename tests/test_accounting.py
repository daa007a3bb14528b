"""Seconds of a row add up, and the draft sees what its policy says."""

from time import thread_time

import pytest

from specextend.decoding import sequence
from tests.tiny_models import of_length, tiny_engine

NEW = 30
SHARES = ("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s", "other_s")
LENGTHS = (200, 90, 41, 15, 300)


def stats_of(engine, max_new_tokens=NEW):
    found = [each.stats for each in engine.generate([of_length(length, max_new_tokens) for length in LENGTHS])]
    assert len(found) == len(LENGTHS)
    return found


def test_plain_steps_are_counted_as_such(pair):
    """No tree, no histogram, no acceptance: those columns are null."""
    for stats in stats_of(tiny_engine(pair, decoding__mode="autoregressive")):
        assert stats.num_plain_steps == stats.num_output_tokens - 1
        assert stats.acceptance_histogram == []
        for name in ("num_spec_steps", "num_retrievals", "draft_s", "draft_prefill_s", "retrieval_s"):
            assert getattr(stats, name) == 0, name
        for name in ("mean_acceptance_length", "draft_acceptance_rate", "retrieval_coverage"):
            assert getattr(stats, name) is None, name


@pytest.mark.parametrize("decode_share", [0.0, 0.5])
def test_seconds_of_a_batch_add_up_to_the_engines_time(decode_share, pair, monkeypatch):
    """A batched step is divided among its sequences, so rows sum to busy time and not to three times as much.

    A chunk of a prompt is its own document's, whoever waits for it.
    """
    monkeypatch.setattr(sequence, "perf_counter", thread_time)  # it stands still while another process has the core
    engine = tiny_engine(pair, decoding__max_batch_size=3)
    engine.decode_share = decode_share
    stats_of(engine, max_new_tokens=3)  # first-time costs
    begin = thread_time()
    stats = stats_of(engine)
    elapsed = thread_time() - begin
    assert 0.9 * elapsed <= sum(getattr(each, name) for each in stats for name in SHARES) <= elapsed
    assert sum(each.total_s for each in stats) > 1.5 * elapsed, "wall clocks overlap"


def trees_and_stats(engine):
    """Every proposed tree (token ids, parents), and the rows' statistics."""
    trees = []
    propose = engine.drafter.propose

    def recording(rows, *num_drafts):
        proposed = propose(rows, *num_drafts)
        trees.extend((tree.token_ids.tolist(), tree.parents.tolist()) for tree in proposed)
        return proposed

    engine.drafter.propose = recording
    return trees, stats_of(engine)


@pytest.mark.parametrize("draft, policy", [("good", "retrieval"), ("bad", "streaming"), ("eagle", "retrieval")])
def test_a_budget_that_holds_everything_gives_the_drafts_of_full(draft, policy, pair):
    """Cache policies differ in what they show, and in nothing else: same trees, same acceptance."""
    full_trees, full = trees_and_stats(tiny_engine(pair, draft, cache__policy="full"))
    engine = tiny_engine(pair, draft, cache__policy=policy, cache__top_k_chunks=64)
    trees, stats = trees_and_stats(engine)
    assert trees == full_trees
    assert [each.acceptance_histogram for each in stats] == [each.acceptance_histogram for each in full]
    if policy == "retrieval":
        assert all(each.retrieval_coverage == pytest.approx(1.0, abs=1e-5) for each in stats)


def test_retrievals_follow_their_schedule(pair):
    """The one from prefill is counted; then one every 3 steps, the step that ends a sequence excepted."""
    for stats in stats_of(tiny_engine(pair, "bad")):
        assert stats.num_retrievals == 1 + (stats.num_spec_steps - 1) // 3 > 1
