"""A GPU waits for its host at each upload, and 7 to 10 us for each operator: a step may have few."""

import sys
from pathlib import Path

import pytest

import specextend
from specextend.decoding import device
from specextend.decoding.device import Graphs
from tests.recorded_graph import captured_engine, record
from tests.step_trace import Tracer, tracing
from tests.tiny_models import random_prompt, request, tiny_engine

PACKAGE = Path(specextend.__file__).parent
OURS = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.stem.endswith("_options")}


class Capturing:
    """Records functions for a tracer, which counts a replay as one operator, as a GPU's host does."""

    def __init__(self):
        self.tracer = Tracer()

    def __call__(self, name, function):
        replay, outputs = record(name, function)

        def launch():
            self.tracer.steps[-1].operators["launch"] += 1
            self.tracer.leaving_out(replay)()

        return launch, outputs


def traced_steps(pair, batch, calls_before_capture, monkeypatch):
    """Trace the speculative steps of a batch, in the fixed shapes of a GPU, up to the one in which the first ends."""
    monkeypatch.setattr(device, "CALLS_BEFORE_CAPTURE", calls_before_capture)
    capture = Capturing()
    changes = {"cache__policy": "full", "decoding__max_batch_size": batch}
    engine = captured_engine(pair, "good", Graphs(capture), **changes)
    with tracing(engine, capture.tracer) as tracer:
        list(engine.generate([request(str(n), random_prompt(102 + n), 24) for n in range(batch)]))
    return [step for step in tracer.steps if step.num_sequences == batch][:-1]


@pytest.mark.parametrize("batch, operators, uploads", [(1, 156, 1), (3, 158, 2)])
def test_an_eager_step_has_few_operators_and_uploads(batch, operators, uploads, pair, monkeypatch):
    """Eight nodes, four levels. `docs/dev/log.md` says what the figures were before."""
    steps = traced_steps(pair, batch, sys.maxsize, monkeypatch)
    assert len(steps) >= 4
    for step in steps:
        assert step.operators.total() <= operators, step.operators
        assert step.num_uploads <= uploads


@pytest.mark.parametrize("batch", [1, 3])
def test_a_captured_step_is_three_launches(batch, pair, monkeypatch):
    """Drafting, verification and absorption. What is left copies their inputs."""
    *_, step = traced_steps(pair, batch, 1, monkeypatch)
    assert step.operators["launch"] == 3
    assert step.operators.total() <= 13, step.operators
    assert step.num_uploads == 1


@pytest.mark.parametrize("draft", ["eagle", "good"])
def test_a_step_crosses_at_most_fifteen_modules(draft, pair, monkeypatch):
    """Who follows one through the code holds as many pages in the head; options that it reads do not count."""
    changes = {"cache__refresh_every": 1, "tree__nodes": "auto", "attention__backend": "sdpa"}
    engine = tiny_engine(pair, draft, **changes)
    drafter = engine.drafter
    steps = list[set[str]]()
    propose = drafter.propose
    absorb = drafter.absorb

    def note(frame, event, arg):
        _, _, module = frame.f_code.co_filename.rpartition("/specextend/")
        steps[-1].add(module)

    def begin(slots, num_nodes):
        steps.append(set())
        sys.setprofile(note)
        return propose(slots, num_nodes)

    def end(slots, decided):
        absorb(slots, decided)
        sys.setprofile(None)

    def leave_out(*_):
        sys.setprofile(None)  # the draft pauses: what it reads then is several steps'
        steps[-1].clear()

    monkeypatch.setattr(drafter, "glance", leave_out)
    monkeypatch.setattr(drafter, "propose", begin)
    monkeypatch.setattr(drafter, "absorb", end)
    list(engine.generate([request("a", random_prompt(102), 24, temperature=0.8)]))
    sys.setprofile(None)  # the last step absorbs nothing: behind it comes the end
    crossed = [{name for name in step if name in OURS} for step in steps[:-1]]
    assert max(map(len, crossed)) <= 15, sorted(max(crossed, key=len))
    assert {"decoding/engine.py", "decoding/sampling.py", "decoding/retrieval.py"} <= set().union(*crossed)
