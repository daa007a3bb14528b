"""Nothing of a request outlives it: not in the next one's tokens, not in caches, however it ended."""

import dataclasses
import shutil
import threading

import pytest

from tests.alive import fresh
from tests.covering import covering, each_once_then_slow
from tests.models.conftest import edit_json
from tests.reference_outputs import tokens_of
from tests.tiny_models import BACKENDS, CONTEXT_LENGTH, Pair, at_call, of_length, random_prompt, request, tiny_engine

DRAFTS = ("good", "eagle", "eagle3", "ngram", "merged-eagle")
POLICIES = ("full", "streaming", "retrieval")
NEW = 24


@pytest.fixture(scope="module")
def alone(pair):
    """What a request gives in an engine that has seen nothing else, without a draft."""
    engine = tiny_engine(pair, decoding__mode="autoregressive")

    def token_ids(length, max_new_tokens=NEW):
        return run(engine, of_length(length, max_new_tokens))[0].token_ids

    return token_ids


def run(engine, *requests):
    return list(engine.generate(requests))


def counts(stats):
    """All but the seconds."""
    return {name: value for name, value in dataclasses.asdict(stats).items() if not name.endswith("_s")}


A_B_A = DRAFTS, POLICIES, [3, 20, 900], BACKENDS


@pytest.mark.parametrize("draft, policy, other, backend", each_once_then_slow(*A_B_A))
def test_a_b_a(draft, policy, other, backend, pair, alone):
    """The public code keeps the last document's chunks: a short one after a long one crashes or reads empty rows."""
    engine = tiny_engine(pair, draft, cache__policy=policy, attention__backend=backend)
    before = fresh(engine)
    first, between, second = (run(engine, of_length(length, NEW))[0] for length in (200, other, 200))
    assert first.token_ids == second.token_ids == alone(200)
    assert counts(first.stats) == counts(second.stats)
    assert between.token_ids == alone(other)
    before.assert_nothing_is_left()


@pytest.mark.parametrize("draft, policy, backend", covering(DRAFTS, POLICIES, BACKENDS, strength=1))
def test_sequences_join_and_leave(draft, policy, backend, pair, alone):
    """Seven requests through three places: each says what it says alone, whoever sits beside it."""
    engine = tiny_engine(pair, draft, cache__policy=policy, attention__backend=backend, decoding__max_batch_size=3)
    before = fresh(engine)
    sizes = [(200, 24), (3, 5), (90, 40), (41, 1), (600, 12), (17, 30), (33, 2)]
    seen = []

    def source():
        for length, max_new_tokens in sizes:
            seen.append(engine.num_active)
            yield of_length(length, max_new_tokens)

    completions = tokens_of(engine.generate(source()))
    assert completions == {str(length): alone(length, max_new_tokens) for length, max_new_tokens in sizes}
    assert max(seen) == 2, "the source is asked only while there is a place"
    before.assert_nothing_is_left(batch=3)


@pytest.mark.parametrize("draft, cancelled", [("good", "600"), ("eagle3", "600"), ("good", "700")])
def test_a_cancelled_request_leaves_nothing(draft, cancelled, pair, alone):
    """No completion follows, its rows come back, its neighbours do not notice: the first is in the middle of a step,
    the second has left the source and waits for rows. A driver's deadline runs in another thread, and must not wait.
    """
    engine = tiny_engine(pair, draft, decoding__max_batch_size=3, decoding__cache_gib=0.0009)
    before = fresh(engine)
    assert before.num_rows < 600 + 700

    def cancel_beside():
        thread = threading.Thread(target=engine.cancel, args=[cancelled], daemon=True)
        thread.start()
        thread.join(600)
        assert not thread.is_alive(), "it must not wait for the step"

    at_call(engine, 20, cancel_beside)
    found = tokens_of(run(engine, *(of_length(length, NEW) for length in (600, 700, 30))))
    assert found == {str(length): alone(length) for length in (600, 700, 30) if str(length) != cancelled}
    before.assert_nothing_is_left(batch=3, cancelled=cancelled)


def fail():
    raise RuntimeError("attention failed")


def test_a_prefill_is_cancelled_between_its_chunks(pair, alone):
    """A prompt of minutes must not be read to its end for nobody."""
    engine = tiny_engine(pair)
    before = fresh(engine)
    at_call(engine, 1, lambda: engine.cancel("gone"))
    assert run(engine, request("gone", random_prompt(1500), NEW)) == []
    assert engine.num_steps == 1
    before.assert_nothing_is_left(cancelled="gone")
    assert run(engine, request("gone", random_prompt(30), NEW))[0].token_ids == alone(30), "the name is free again"


@pytest.mark.parametrize("draft, call", [("good", 1), ("eagle", 2), ("merged-eagle", 20)])
def test_a_request_that_fails_alone_is_an_error_and_the_next_one_runs(draft, call, pair, alone):
    """In prefill, and in the middle of a verification."""
    engine = tiny_engine(pair, draft)
    before = fresh(engine)
    at_call(engine, call, fail)
    errors = []
    requests = of_length(200, NEW), of_length(90, NEW)
    completions = engine.generate(requests, lambda name, error: errors.append((name, str(error))))
    assert tokens_of(completions) == {"90": alone(90)}
    assert errors == [("200", "attention failed")]
    before.assert_nothing_is_left()


@pytest.mark.parametrize("blame", [False, True])
def test_a_failure_of_a_whole_batch_is_raised_and_leaves_an_engine_that_works(blame, pair, alone):
    """Only one sequence alone can be blamed; who asks is told which ones it was."""
    engine = tiny_engine(pair, decoding__max_batch_size=2)
    before = fresh(engine)
    at_call(engine, 20, fail)
    requests = [of_length(n, NEW) for n in (200, 90, 50)]
    errors = []
    with pytest.raises(RuntimeError, match="attention failed") as failure:
        list(engine.generate(requests, (lambda *error: errors.append(error)) if blame else None))
    assert not blame or failure.value.request_ids == ["200", "90"]
    del failure  # its traceback holds the frames of the failed step
    before.assert_nothing_is_left(batch=2)
    assert tokens_of(run(engine, of_length(90, NEW))) == {"90": alone(90)}


@pytest.mark.parametrize("draft", ["good", "merged-eagle"])
def test_closing_the_generator_early_frees_everything(draft, pair, alone):
    """A caller may stop listening; what runs is dropped."""
    engine = tiny_engine(pair, draft, decoding__max_batch_size=3)
    before = fresh(engine)
    completions = engine.generate(of_length(n, n) for n in (10, 60, 90, 200))
    assert next(completions).request_id == "10"
    assert engine.num_active == 2
    completions.close()
    before.assert_nothing_is_left(batch=3)
    assert tokens_of(run(engine, of_length(90, NEW))) == {"90": alone(90)}


@pytest.mark.parametrize("mode", ["autoregressive", "specextend"])
def test_a_request_that_can_never_fit_is_refused(mode, pair, alone):
    """With the numbers, by one limit for all modes; without `on_error` before anything runs, with it others go on."""
    engine = tiny_engine(pair, decoding__mode=mode)
    room = CONTEXT_LENGTH - 5
    assert engine.max_tokens == room
    requests = of_length(2000, room - 1999), of_length(30, NEW)
    message = rf"^prompt \(2000\) and max_new_tokens \({room - 1999}\) exceed the {room} tokens"
    with pytest.raises(ValueError, match=message):
        run(engine, *requests)
    errors = []
    completions = list(engine.generate(requests, lambda *error: errors.append(error)))
    assert [each.token_ids for each in completions] == [alone(30)]
    assert [name for name, _ in errors] == ["2000"]


def test_a_request_that_exceeds_the_whole_cache_is_refused(pair):
    """It would wait for rows for ever."""
    engine = tiny_engine(pair, decoding__cache_gib=0.0009)
    with pytest.raises(ValueError, match=r"^1,800 tokens do not fit the cache of 1,280 rows; raise decoding.cache_gib"):
        run(engine, of_length(1700, 100))


@pytest.mark.parametrize("draft, policy", covering(DRAFTS, POLICIES, strength=1))
def test_the_longest_request_that_fits_runs_to_its_end(draft, policy, pair, alone):
    """The last tree still finds rows and positions."""
    engine = tiny_engine(pair, draft, cache__policy=policy)
    max_new_tokens = 30
    length = engine.max_tokens - max_new_tokens
    [completion] = run(engine, of_length(length, max_new_tokens))
    assert completion.token_ids == alone(length, max_new_tokens)


def test_a_name_that_is_running_is_refused(pair):
    """Two requests of one name could not be told apart by `cancel` or `progress`."""
    engine = tiny_engine(pair, decoding__max_batch_size=2)
    with pytest.raises(ValueError, match="'a' is running already"):
        run(engine, request("a", random_prompt(30), NEW), request("a", random_prompt(40), NEW))


@pytest.mark.parametrize("draft", ["good", "eagle"])
def test_one_new_token_needs_no_draft(draft, pair, alone):
    [completion] = run(tiny_engine(pair, draft), of_length(30, 1))
    assert (completion.token_ids, completion.finish_reason) == (alone(30)[:1], "length")
    stats = completion.stats
    assert (stats.num_spec_steps, stats.acceptance_histogram, stats.decode_s) == (0, [], 0)


def with_eos(pair, folder, *eos_token_ids):
    """The same pair, whose target names other tokens that end an output."""
    shutil.copytree(pair.target, folder)
    edit_json(folder / "generation_config.json", eos_token_id=[*eos_token_ids])
    return Pair(str(folder), pair.drafts)


@pytest.mark.parametrize("draft, position", [("same", 0), ("same", 7), ("bad", 7)])
def test_output_ends_with_its_eos(draft, position, pair, alone, tmp_path):
    """Any of several EOS ids, as first token or inside an accepted path; no token past it, no text of it.

    Unless a request asks to go on: a benchmark of long outputs must not measure short ones.
    """
    expected = alone(90)
    eos = expected[position]
    end = expected.index(eos) + 1
    engine = tiny_engine(with_eos(pair, tmp_path / "target", 2, eos), draft, decoding__max_batch_size=2)
    goes_on = request("c", random_prompt(90), NEW, ignore_eos=True)
    completions = run(engine, *(request(name, random_prompt(90), NEW) for name in "ab"), goes_on)
    assert tokens_of(completions) == {"a": expected[:end], "b": expected[:end], "c": expected}
    for completion in completions:
        if completion.request_id == "c":
            assert completion.finish_reason == "length"
        else:
            assert completion.finish_reason == "stop"
            assert completion.text == engine.tokenizer.decode(expected[: end - 1])


@pytest.mark.parametrize("draft", ["same", "bad"])
def test_output_ends_with_the_token_that_completes_a_stop_string(draft, pair, alone):
    """Across a token border, in the middle of an accepted path; the text ends before the string."""
    engine = tiny_engine(pair, draft)
    words = [f"t{token_id}" for token_id in alone(90)]
    stop = f"{words[9][-1]} {words[10][:2]}"
    end = next(n for n in range(len(words)) if stop in " ".join(words[:n]))
    [completion] = run(engine, of_length(90, NEW, stop=("nowhere", stop)))
    assert completion.token_ids == alone(90)[:end]
    assert completion.finish_reason == "stop"
    assert completion.text == " ".join(words[:end]).partition(stop)[0]
