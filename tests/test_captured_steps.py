"""Captured steps, without a GPU: steps that are recorded once and replayed decide the tokens of plain decoding."""

from __future__ import annotations

import pytest
import torch

from specextend.decoding import graphs as graphs_module
from specextend.decoding.graphs import Graphs
from tests.covering import each_once_then_slow
from tests.recorded_graph import Recorder, captured_engine, record
from tests.tiny_models import random_prompt, request, tiny_engine

NEW = 32
AXES = (
    ("good", "eagle", "copy", "eagle3", "reduced", "merged-cut"),
    ("full", "streaming", "retrieval"),
    (1, 3),
    (0.0, 0.7),
)


@pytest.fixture(autouse=True)
def captured_at_once(monkeypatch):
    """The second step of a kind is captured, not the ninth: outputs are short here."""
    monkeypatch.setattr(graphs_module, "CALLS_BEFORE_CAPTURE", 1)


class Counting:
    """Records functions, and counts their replays."""

    def __init__(self) -> None:
        self.num_captured = self.num_replays = 0

    def __call__(self, function):
        replay, outputs = record(function)
        self.num_captured += 1

        def counted() -> None:
            self.num_replays += 1
            replay()

        return counted, outputs


def requests(temperature: float):
    """Five documents of different lengths for up to three slots: they join and leave at different steps."""
    lengths = ((300, NEW), (37, 9), (129, NEW), (64, 17), (200, 25))
    return [request(str(n), random_prompt(n), new, temperature=temperature, seed=n) for n, new in lengths]


@pytest.mark.parametrize(
    ("draft", "policy", "batch", "temperature"),
    each_once_then_slow(*AXES),
)
def test_replayed_steps_decide_the_same_tokens(draft, policy, batch, temperature, pairs):
    """A replay reads nothing of the host: a length, a slot or a root that was baked in would show at once."""
    capture, changes = Counting(), {"cache__policy": policy, "decoding__max_batch_size": batch}
    captured = captured_engine(pairs("llama"), draft, Graphs(capture), **changes)
    plain = tiny_engine(pairs("llama"), decoding__mode="autoregressive")
    outputs = {each.request_id: each.token_ids for each in captured.generate(requests(temperature))}
    assert outputs == {each.request_id: each.token_ids for each in plain.generate(requests(temperature))}
    assert capture.num_replays > 2 * capture.num_captured > 4


@pytest.mark.slow
def test_every_capture_of_a_step_is_the_same(pairs, monkeypatch):
    """Other lengths, other tokens, another acceptance: equal operators with equal shapes and numbers.

    Four kinds in all: drafting, verification, and absorption of a prompt's first token and of a step's.
    """
    captured = []

    def noting(function):
        recorder = Recorder()
        with recorder:
            outputs = function()
        captured.append(tuple(call.signature for call in recorder.calls))
        graphs.clear()  # the next step is captured again
        return (lambda: [call.replay() for call in recorder.calls]), outputs

    graphs = Graphs(noting)
    monkeypatch.setattr(graphs_module, "CALLS_BEFORE_CAPTURE", 0)
    list(captured_engine(pairs("llama"), "good", graphs).generate(requests(0.0)))
    assert len(captured) > 60
    assert len(set(captured)) == 4


def test_where_a_step_cannot_be_captured_it_runs_eagerly(pairs, caplog):
    """Chosen once, and said: a job on a driver that lacks something is slower, not dead."""

    def refusing(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = Graphs(refusing)
    outputs = [each.token_ids for each in captured_engine(pairs("llama"), "good", graphs).generate(requests(0.0))]
    expected = tiny_engine(pairs("llama"), decoding__mode="autoregressive").generate(requests(0.0))
    assert outputs == [each.token_ids for each in expected]
    assert not graphs.enabled
    [said] = [each.message for each in caplog.records if "without graphs" in each.message]
    assert "operation not permitted" in said


def test_memory_that_runs_out_at_a_capture_is_the_ladders_business(pairs):
    """Less at once may help, so graphs are not given up; the sequences start again."""
    refused = iter([True])

    def scarce(function):
        if next(refused, False):
            raise torch.OutOfMemoryError("out of memory")
        return record(function)

    graphs = Graphs(scarce)
    [completion] = captured_engine(pairs("llama"), "good", graphs).generate(requests(0.0)[:1])
    assert graphs.enabled
    assert completion.stats.num_memory_retries == 1
