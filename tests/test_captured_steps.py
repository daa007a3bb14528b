"""Captured steps, without a GPU: steps that are recorded once and replayed decide the tokens of plain decoding."""

from functools import cache

import pytest
import torch

from specextend.attention.plan import HostReadError
from specextend.decoding import device
from specextend.decoding.device import Graphs
from tests.covering import each_once_then_slow
from tests.recorded_graph import SharedMemory, captured_engine
from tests.reference_outputs import tokens_of
from tests.tiny_models import of_length, tiny_engine

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
    monkeypatch.setattr(device, "CALLS_BEFORE_CAPTURE", 1)


class Counting:
    """Records functions, and counts their replays."""

    def __init__(self):
        self.captured = []
        self.num_replays = 0
        self.record = SharedMemory()

    def __call__(self, name, function):
        replay, outputs = self.record(name, function)
        self.captured.append(name)

        def counted():
            self.num_replays += 1
            replay()

        return counted, outputs


def requests(temperature):
    """Five documents of different lengths for up to three slots: they join and leave at different steps."""
    lengths = ((300, NEW), (37, 9), (129, NEW), (64, 17), (200, 25))
    return [of_length(n, new, temperature=temperature, seed=n) for n, new in lengths]


def decode(engine, temperature=0.0):
    """The tokens that the requests give, by their names."""
    return tokens_of(engine.generate(requests(temperature)))


@pytest.fixture(scope="module")
def plain(pair):
    """Temperature -> what plain decoding gives."""
    engine = tiny_engine(pair, decoding__mode="autoregressive")
    return cache(lambda temperature: decode(engine, temperature))


@pytest.mark.parametrize("draft, policy, batch, temperature", each_once_then_slow(*AXES))
def test_replayed_steps_decide_the_same_tokens(draft, policy, batch, temperature, pair, plain):
    """A replay reads nothing of the host: a length, a slot or a root that was baked in would show at once."""
    capture = Counting()
    changes = {"cache__policy": policy, "decoding__max_batch_size": batch}
    captured = captured_engine(pair, draft, Graphs(capture), **changes)
    captured.decode_share = device.GPU.decode_share
    assert decode(captured, temperature) == plain(temperature)
    assert capture.num_replays > 2 * len(capture.captured) > 4


def test_captured_steps_that_were_not_used_for_longest_make_room(pair, plain, monkeypatch):
    """Batches of 32 have steps of hundreds of shapes. What is forgotten is captured again, and decides the same."""
    monkeypatch.setattr(device, "MOST_GRAPHS", 3)
    capture = Counting()
    engine = captured_engine(pair, "eagle", Graphs(capture), decoding__max_batch_size=3)
    assert decode(engine) == plain(0.0)
    assert len(capture.captured) > 3
    assert capture.num_replays > len(capture.captured)


def test_a_step_that_cannot_be_captured_ends_all_captures(pair, plain, caplog):
    """Chosen once, and said: a job on a driver that lacks something is slower, not dead.

    The allocator may go on as if it were captured, so another try is not safe in this process.
    """
    tries = []

    def failing(name, function):
        tries.append(function)
        raise RuntimeError("operation not permitted")

    graphs = Graphs(failing)
    assert decode(captured_engine(pair, "good", graphs)) == plain(0.0)
    assert len(tries) == 1
    assert graphs.enabled is False
    [said] = [each.message for each in caplog.records if "without graphs" in each.message]
    assert "operation not permitted" in said


def test_memory_that_runs_out_in_a_capture_costs_that_graph_alone(pair, plain):
    """The first graph that did not fit ended all others, and a small draft's step is mostly its host."""
    capture = Counting()
    failed = []

    def without_memory_at_first(name, function):
        if name not in failed:
            failed.append(name)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(name, function)

    graphs = Graphs(without_memory_at_first)
    assert decode(captured_engine(pair, "good", graphs)) == plain(0.0)
    assert graphs.enabled
    assert len(failed) >= 2
    assert capture.num_replays > 0


def sized(nodes, depth):
    return {"cache__policy": "full", "tree__nodes": nodes, "tree__depth": depth}


@pytest.mark.parametrize(
    "draft, prompts, sizes, least_captured",
    [
        ("good", "sdpa", {}, 3),
        ("eagle3", "flash", {}, 3),
        ("merged-eagle", "triton", {}, 3),
        ("good", "triton", sized(130, 3), 1),
        ("good", "triton", sized(60, 10), 3),
        ("good", "triton", sized(50, 10), 4),
    ],
)
def test_replayed_drafts_are_those_of_eager_steps(draft, prompts, sizes, least_captured, pair, plain):
    """What a draft reads after a step is causal, too, and went to the kernel of prompts, which reads places once.

    Replays attended to the rows of the capture, so a draft proposed what nobody accepts: text stayed right, and slow.
    Masks of more than 512 rows go to a kernel that reads lengths on the host: such steps run eagerly.
    """
    changes = {"tree__threshold": 0.0, "decoding__max_batch_size": 3, "prompts": prompts, **sizes}
    captured = Counting()
    trees = []
    for capture in (captured, run_again):
        engine = captured_engine(pair, draft, Graphs(capture), **changes)
        trees.append(noting_trees(engine))
        assert decode(engine) == plain(0.0)
    assert trees[0] == trees[1]
    assert len(captured.captured) >= least_captured
    assert captured.num_replays > len(captured.captured)


def test_trees_that_ngrams_made_have_few_sizes(pair, plain):
    """They had any, so that no step came often enough to be captured, or pushed out one that had been."""
    capture = Counting()
    engine = captured_engine(pair, "merged-eagle", Graphs(capture), tree__threshold=0.0, decoding__max_batch_size=1)
    assert decode(engine) == plain(0.0)
    assert capture.captured.count("verify") <= 2, "of roots, and of trees"


def run_again(name, function):
    """Run a function anew each time, as an eager step with the shapes of captured ones."""
    raise HostReadError("run eagerly")


def noting_trees(engine):
    """The tokens and depths of each tree that a draft proposes from now on, in no order of their own."""
    trees = []
    propose = engine.drafter.propose

    def proposing(slots, *num_drafts):
        proposed = propose(slots, *num_drafts)
        trees.extend(sorted(zip(tree.token_ids.tolist(), tree.depths.tolist(), strict=True)) for tree in proposed)
        return proposed

    engine.drafter.propose = proposing
    return trees
