"""Adaptive speculation in the engine: whatever it decides, the output is the target's own and the counts add up."""

from dataclasses import replace
from random import Random

import pytest

from specextend.decoding import device, measurements, speculation
from specextend.decoding.speculation import Adaptive, StepCosts
from specextend.stats import DecodingStats
from tests.faults.scarce import before_forwards
from tests.recorded_graph import captured_engine, record
from tests.reference_outputs import tokens_of
from tests.tiny_models import engine_with, of_length, tiny_config, tiny_engine

LENGTHS = (300, 41, 150)
NEW = 50
SAMPLING = {"temperature": 0.8, "top_p": 0.9}
NUM_NODES = 8
SIZES = (1, 2, 4, 9)
CAPTURED = (8, 4, 2)


@pytest.fixture(scope="module")
def sampled(pair):
    """Autoregressive sampling of the same requests."""
    return tokens_of(run(tiny_engine(pair, decoding__mode="autoregressive"), **SAMPLING))


class ScriptedCosts(StepCosts):
    """Costs that no clock has a say in. Seconds of a verification by its rows, and of drafting at any time."""

    def __init__(self, verify, draft):
        super().__init__(dict.fromkeys(SIZES, (1.0, 0.0)))
        self._verify = verify
        self._draft = draft

    def verify_s(self, num_rows, lengths):
        return self._verify(num_rows)

    def draft_s(self, num_sequences, width=0):
        return self._draft()

    def observe_verify(self, num_rows, lengths, seconds):
        assert seconds > 0

    def observe_draft(self, phase, num_sequences, seconds, width=0):
        assert seconds > 0


class PausesAtRandom(Adaptive):
    """Takes the decisions out of the costs' hands: any sequence may stop or go on speculating after any step."""

    def __init__(self, costs, num_drafts, seed, captured=()):
        super().__init__(costs, num_drafts, captured)
        self._random = Random(seed)

    def decide(self, sequences):
        for sequence in sequences:
            if self._random.random() < 0.4:
                if sequence.speculation.active:
                    sequence.speculation.pause()
                else:
                    sequence.speculation.resume()


def adaptive_engine(pair, draft, adaptive, batch=1, **changes):
    config = tiny_config(pair, draft, attention__tree="dense", **{"decoding__max_batch_size": batch} | changes)
    return engine_with(config, adaptive=adaptive)


def scripted(verify, draft):
    return Adaptive(ScriptedCosts(verify, draft), NUM_NODES)


def run(engine, lengths=LENGTHS, **sampling):
    return list(engine.generate([of_length(n, NEW, seed=n, **sampling) for n in lengths]))


def check_counts(stats):
    """The identities of the data contract."""
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    assert sum(n * steps for n, steps in enumerate(stats.acceptance_histogram)) == stats.num_accepted_tokens
    assert stats.num_spec_steps <= stats.num_draft_tokens <= 8 * stats.num_spec_steps
    decided = 1 + stats.num_plain_steps + stats.num_spec_steps + stats.num_accepted_tokens
    assert 0 <= decided - stats.num_output_tokens < 5, "a tree has four levels"
    assert stats.num_hybrid_steps <= stats.num_spec_steps


def checked(engine, references, lengths=LENGTHS):
    """The statistics of what `run` gives, which is the target's own; and their sum."""
    completions = run(engine, lengths)
    assert tokens_of(completions) == {str(n): references("llama", n, NEW).token_ids for n in lengths}
    total = DecodingStats()
    for completion in completions:
        check_counts(completion.stats)
        total.add(completion.stats)
    return [completion.stats for completion in completions], total


@pytest.mark.parametrize(
    "draft, policy, batch, captured",
    [
        ("same", "full", 3, ()),
        ("bad", "streaming", 1, ()),
        ("eagle", "retrieval", 3, CAPTURED),
        ("eagle3", "retrieval", 3, ()),
    ],
)
def test_output_does_not_depend_on_when_speculation_pauses(
    draft, policy, batch, captured, pair, references, sampled, monkeypatch
):
    """A draft that comes back late has many tokens to catch up with: each step of a mixed batch is tried here.

    With graphs the host does not wait for a draft, so sizes follow its certainty one step late.
    """
    monkeypatch.setattr(device, "CALLS_BEFORE_CAPTURE", 1)
    costs = ScriptedCosts(lambda rows: 1 + rows / 10, lambda: 0.1)
    adaptive = PausesAtRandom(costs, NUM_NODES, seed=0, captured=captured)
    changes = {"decoding__max_batch_size": batch, "cache__policy": policy}
    if captured:
        engine = captured_engine(pair, draft, device.Graphs(record), adaptive, **changes)
    else:
        engine = adaptive_engine(pair, draft, adaptive, **changes)
    _, total = checked(engine, references)
    assert min(total.num_plain_steps, total.num_spec_steps) > 10
    most = 0.8 if captured else 1.0
    assert total.num_spec_steps < total.num_draft_tokens <= most * NUM_NODES * total.num_spec_steps
    assert tokens_of(run(engine, **SAMPLING)) == sampled


def test_trees_that_always_lose_are_given_up(pair, references):
    """Drafting costs five plain steps: two tries at the start, then plain decoding to the end."""
    for batch in (1, 3):
        engine = adaptive_engine(pair, "good", scripted(lambda rows: 1.0, lambda: 5.0), batch)
        each, _ = checked(engine, references)
        assert {(stats.num_spec_steps, stats.num_fallbacks) for stats in each} == {(2, 1)}


def test_speculation_comes_back_when_drafting_gets_cheap(pair, references):
    """Reversible: dear at first, free from then on."""
    steps = []

    def drafting():
        steps.append(None)
        return 5.0 if len(steps) < 12 else 0.0

    engine = adaptive_engine(pair, "same", scripted(lambda rows: 1.0, drafting), cache__policy="full")
    _, stats = checked(engine, references, [300])
    assert stats.num_fallbacks == 1
    assert stats.num_spec_steps > 5


def verify_s(num_rows):
    """Seconds of a step on it: as many as a plain step's for up to nine rows, and then in proportion."""
    return max(1.0, num_rows / 9)


class Device:
    """A host and a device with a time line each: a replay takes the host no time, and the device some seconds."""

    def __init__(self, draft_s):
        self.now = self.free_at = 0.0
        self._seconds = {"draft": draft_s, "absorb": 0.1}

    def clock(self):
        return self.now

    def wait(self, *_):
        self.now = max(self.now, self.free_at)

    def work(self, seconds):
        """Take time while the host waits."""
        self.wait()
        self.now += seconds

    def capture(self, name, function):
        replay, outputs = record(name, function)
        seconds = verify_s(function.args[1].numel()) if name == "verify" else self._seconds[name]

        def launch():
            self.now += 0.01
            self.free_at = max(self.now, self.free_at) + seconds
            replay()
            if name == "verify":  # its tokens are read at once
                self.wait()

        return launch, outputs


@pytest.fixture
def simulated(monkeypatch):
    """Make the device of all engines from now on, and costs of its steps."""

    def make(draft_s):
        made = Device(draft_s)
        monkeypatch.setattr("specextend.decoding.sequence.perf_counter", made.clock)
        monkeypatch.setattr("specextend.decoding.engine.synchronise", made.wait)
        return made, StepCosts({size: (verify_s(size), 0.0) for size in (*SIZES, 27)})

    return make


@pytest.mark.parametrize(
    "draft_s, least, most",
    [
        pytest.param(0.5, 7, 8, id="whole trees where rows are free"),
        pytest.param(5.0, 0, 3, id="none of a draft of five plain steps"),
    ],
)
def test_captured_steps_do_what_the_device_makes_pay(draft_s, least, most, simulated, pair, references, monkeypatch):
    """Launches were timed, not work: a draft of five plain steps for five tokens seemed free, and its target slow."""
    simulation, costs = simulated(draft_s)
    monkeypatch.setattr("specextend.decoding.engine.TIMED_EVERY", 4)  # outputs are short
    monkeypatch.setattr(speculation, "TURN", 1000)  # no plain turn
    adaptive = Adaptive(costs, NUM_NODES, CAPTURED)
    graphs = device.Graphs(simulation.capture, 0)
    changes = {"decoding__max_batch_size": 1, "cache__policy": "full"}
    engine = captured_engine(pair, "same", graphs, adaptive, **changes)
    _, total = checked(engine, references)
    assert costs.draft_s(1) == pytest.approx(draft_s + 0.1, abs=0.1)
    assert costs.verify_s(1, [300]) == pytest.approx(1.0, abs=0.1)
    assert least <= total.num_draft_tokens / (total.num_plain_steps + total.num_spec_steps) <= most


@pytest.mark.parametrize("captured, batch", [(True, 1), (False, 3)])
@pytest.mark.parametrize("read_s", [0.0, 70.0])
def test_drafts_that_take_longer_than_they_save_are_left_out_for_a_while(
    read_s, captured, batch, simulated, pair, references, monkeypatch
):
    """Each step was won, and the run lost: what drafts read of prompts was in no account, and a plain step untried."""
    simulation, costs = simulated(0.5)
    for name, value in {"TURN": 4, "TRIAL_DOCUMENTS": 4, "DECIDED_DOCUMENTS": 6}.items():
        monkeypatch.setattr(speculation, name, value)
    adaptive = Adaptive(costs, NUM_NODES)
    changes = {"decoding__max_batch_size": batch, "cache__policy": "full"}
    graphs = device.Graphs(simulation.capture, 0)
    engine = (
        captured_engine(pair, "same", graphs, adaptive, **changes)
        if captured
        else adaptive_engine(pair, "same", adaptive, **changes)
    )
    before_forwards(engine, lambda forward: simulation.work(verify_s(forward.num_rows) if forward.is_step else 1.0))
    read = engine.drafter.prefill
    monkeypatch.setattr(engine.drafter, "prefill", lambda *args: (simulation.work(read_s), read(*args)))
    each = [stats for _ in range(8) for stats in checked(engine, references)[0]]
    drafted = "".join("-d"[stats.num_spec_steps > 0] for stats in each)
    assert [*filter(None, drafted.split("d"))] == (["-" * 6] * 2 if read_s else [])

    def taken_s(drafts):
        begin = simulation.now
        list(engine.generate([replace(of_length(n, NEW, seed=n), drafts=drafts) for n in LENGTHS]))
        return simulation.now - begin

    assert engine.speedup == pytest.approx(taken_s(drafts=False) / taken_s(drafts=True), rel=0.1)


def test_a_configuration_turns_it_on(pair, references, monkeypatch, tmp_path):
    """With costs from the start-up: a draft as large as the target that is never right is given up after a few steps.

    The clock is told what a row takes, since a stall in the measurement of a plain step would make trees look cheap.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no other test finds these times
    monkeypatch.setattr(measurements, "time_step", lambda target, kind, size, *_: 0.001 * size)
    engine = tiny_engine(pair, "bad", tree__nodes="auto", tree__max_nodes=8, attention__tree="auto")
    each, _ = checked(engine, references)
    assert min(min(stats.num_fallbacks, stats.num_plain_steps) for stats in each) >= 1
