"""A prompt is read in turns with the steps of those that run: nobody waits for more than a chunk, no token changes."""

from dataclasses import replace

import pytest

from specextend.decoding import device
from tests.alive import fresh
from tests.covering import covering
from tests.faults.scarce import before_forwards, run_out
from tests.reference_outputs import tokens_of
from tests.tiny_models import random_prompt, request, tiny_engine

CHUNK = 64
NEW = 60
DOCUMENT = random_prompt(500, seed=1)
PROMPTS = [
    random_prompt(40),
    DOCUMENT,
    [*DOCUMENT, *random_prompt(200, seed=2)],
    random_prompt(700),
    [*DOCUMENT[:300], 7],
]
"""The third and the last take rows over from the one before them, or do not: only one that was read whole counts."""
GREEDY = {}
SAMPLED = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.1}
DRAFTS = ("good", "eagle", "ngram", "merged-eagle")


@pytest.fixture
def in_turns(pair, monkeypatch):
    """Makes engines whose chunks are short; without a `share` a prompt is read while all others wait."""

    def make(draft, batch, share=0.5, **changes):
        monkeypatch.setattr(device, "CPU", replace(device.CPU, prefill_chunk=CHUNK))
        mode = {} if draft else {"decoding__mode": "autoregressive"}
        engine = tiny_engine(pair, draft or "good", decoding__max_batch_size=batch, **mode, **changes)
        engine.decode_share = share
        return engine

    return make


def fail():
    raise RuntimeError("attention failed")


def run(engine, sampling, on_error=None):
    requests = [request(str(n), prompt, NEW, **sampling) for n, prompt in enumerate(PROMPTS)]
    return tokens_of(engine.generate(requests, on_error))


@pytest.fixture
def alone(in_turns):
    """What each prompt gives by itself, greedily and without a draft."""
    return run(in_turns(None, 1), GREEDY)


@pytest.mark.parametrize(
    "draft, policy, batch, sampling, share",
    covering(DRAFTS, ["full", "streaming", "retrieval"], [2, 4], [GREEDY, SAMPLED], [0.5, 0.05], strength=1),
)
def test_turns_change_no_token_and_nobody_waits_for_more_than_a_chunk(draft, policy, batch, sampling, share, in_turns):
    """Nor what is taken over from the prompt before, with which documents begin that join a running batch.

    Running documents stood still for whole prompts: seconds on a GPU.
    """
    expected = run(in_turns(None, 1), sampling)
    engine = in_turns(draft, batch, share, cache__policy=policy)
    before = fresh(engine)
    seen = []
    before_forwards(engine, lambda forward: seen.append((forward.is_step, engine.num_active > 1)))
    assert run(engine, sampling) == expected
    chunks = [n for n, (is_step, others_wait) in enumerate(seen) if others_wait and not is_step]
    assert len(chunks) > 5
    assert all(seen[n - 1][0] for n in chunks)
    engine.decode_share = 0.0
    before.assert_nothing_is_left(batch=batch)


@pytest.mark.parametrize("how", ["cancelled", "failed", "lacks memory", "neighbour lacks memory"])
def test_a_prompt_that_is_half_read_ends_as_any_other(how, in_turns, alone):
    """Its neighbours run on meanwhile; its rows and its place are free afterwards."""
    engine = in_turns("eagle", 2, cache__policy="full")
    before = fresh(engine)
    acts = {"cancelled": lambda: engine.cancel("1"), "failed": fail}
    half_read = [False]
    done = [False]

    def look(forward):
        half_read[0] |= not forward.is_step and forward.longest == 4 * CHUNK
        if half_read[0] and not done[0] and forward.is_step == (how == "neighbour lacks memory"):
            done[0] = True
            acts.get(how, run_out)()

    before_forwards(engine, look)
    errors = []
    outputs = run(engine, GREEDY, lambda name, error: errors.append(name))
    assert done[0]
    assert errors == (["1"] if how == "failed" else [])
    assert outputs == {name: alone[name] for name in alone if name != "1" or "memory" in how}
    engine.decode_share = 0.0
    before.assert_nothing_is_left(batch=2, cancelled="1")
