"""Memory that runs out, and a device that is beyond use."""

import pytest

from specextend.decoding.admission import PATIENCE
from specextend.decoding.device import is_out_of_memory
from tests.alive import fresh
from tests.faults.scarce import Memory, before_forwards, run_out
from tests.reference_outputs import tokens_of
from tests.tiny_models import of_length, tiny_engine

LENGTHS = (300, 37, 129, 90)
NEW = 24
DRAFTS = ("good", "eagle3", "merged-eagle", "ngram")
BATCHES = Memory(step_rows=9)  # a whole tree of 8 nodes and its root, once
TREES = Memory(step_rows=3)
CHUNKS = Memory(chunk=64)
PLAIN = Memory(step_rows=1)


@pytest.fixture(scope="module")
def alone(pair):
    """What a request gives without a draft, with nobody beside it and memory enough."""
    return tokens_of(run(tiny_engine(pair, decoding__mode="autoregressive", decoding__max_batch_size=1), *LENGTHS))


def run(engine, *lengths, on_error=None):
    return list(engine.generate([of_length(length, NEW) for length in lengths], on_error))


def watched(engine):
    """The engine's forwards, those that ran."""
    seen = []
    before_forwards(engine, seen.append)
    return seen


@pytest.mark.parametrize("draft, memory", [*zip(DRAFTS, (BATCHES, TREES, PLAIN, CHUNKS), strict=True), ("good", PLAIN)])
def test_with_less_memory_the_same_tokens_come_in_smaller_pieces(draft, memory, pair, alone):
    """Every rung of the ladder is lossless: a batch, a tree and a chunk decide when a token comes, never which one.

    What fits is not given up. Fewer sequences first: the draft is what makes the job fast.
    """
    engine = tiny_engine(pair, draft, decoding__max_batch_size=3)
    before = fresh(engine)
    ran = watched(engine)
    before_forwards(engine, memory.allow)
    completions = run(engine, *LENGTHS)
    assert tokens_of(completions) == alone
    steps = [forward for forward in ran if forward.is_step]
    assert max(forward.num_rows for forward in steps) <= memory.step_rows
    assert max(forward.num_rows for forward in ran if not forward.is_step) <= memory.chunk
    assert max(each.stats.num_memory_retries for each in completions) >= 1, "and the row says so"
    if memory is BATCHES:
        assert all(each.stats.num_spec_steps > 0 for each in completions)
        assert max(forward.num_new for forward in steps) == 9
    assert memory is not CHUNKS or max(forward.num_sequences for forward in steps) == 3
    before.assert_nothing_is_left(batch=3)


@pytest.mark.parametrize("moment", ["propose", "absorb", "select", "prefill"])
def test_a_draft_that_runs_out_of_memory_is_done_without(moment, pair, alone, monkeypatch):
    """Half a draft's state may have changed when it fails: its document begins again, from nothing."""
    engine = tiny_engine(pair, decoding__max_batch_size=2)
    before = fresh(engine)
    monkeypatch.setattr(engine.drafter, moment, lambda *_: run_out())
    completions = run(engine, *LENGTHS)
    assert tokens_of(completions) == alone
    assert sum(each.stats.num_spec_steps for each in completions) == 0
    before.assert_nothing_is_left(batch=2)


def test_a_document_that_does_not_fit_at_all_fails_alone(pair, alone):
    """It ends as one error; its neighbours do not know."""
    engine = tiny_engine(pair, decoding__max_batch_size=3)
    before = fresh(engine)
    before_forwards(engine, Memory(document=200).allow)
    errors = []
    completions = run(engine, *LENGTHS, on_error=lambda name, error: errors.append((name, is_out_of_memory(error))))
    assert tokens_of(completions) == {name: alone[name] for name in ("37", "129", "90")}
    assert errors == [("300", True)]
    before.assert_nothing_is_left(batch=3)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run(engine, 300)


def test_after_some_documents_everything_is_tried_again(pair):
    """One giant among many must not slow the rest of the night down."""
    engine = tiny_engine(pair, decoding__max_batch_size=3)
    ran = watched(engine)
    failures = iter([True])

    def fail_once(forward):
        if forward.is_step and next(failures, False):
            run_out()

    before_forwards(engine, fail_once)
    completions = run(engine, *range(20, 20 + PATIENCE + 6))
    assert len(completions) == PATIENCE + 6
    sizes = [forward.num_sequences for forward in ran if forward.is_step]
    assert sizes[0] == 1
    assert 3 in sizes


def test_what_waits_to_begin_again_can_be_cancelled(pair, alone):
    """Its lease was taken back meanwhile: nobody waits for it any more."""
    engine = tiny_engine(pair, decoding__max_batch_size=2)
    before = fresh(engine)

    def cancel_and_run_out(forward):
        if forward.is_step and forward.num_sequences > 1:
            engine.cancel("300")
            run_out()

    before_forwards(engine, cancel_and_run_out)
    completions = run(engine, 37, 300, 90)
    assert tokens_of(completions) == {name: alone[name] for name in ("37", "90")}
    before.assert_nothing_is_left(batch=2)
