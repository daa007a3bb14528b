"""Steps and seconds of a row add up."""

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
