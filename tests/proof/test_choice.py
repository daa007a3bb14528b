"""What a proof chose is what an engine runs, once the loaded target has confirmed it."""

import pytest
import torch

from specextend import loading
from specextend.attention.backends import Trial
from specextend.attention.plain import attend_reference
from specextend.attention.torch_kernels import attend_by_head
from specextend.decoding.device import Graphs
from specextend.loading import choose_kernels, confirm
from specextend.pairing import check_pair
from specextend.proof.confirmation import compare_logits, what_is_wrong_in_logits
from specextend.proof.ladder import Kernels, Proof
from tests.proof.faulty import a_little_wrong, not_a_number
from tests.recorded_graph import captured_engine, record
from tests.tiny_models import tiny_config, tiny_engine

LEFT_OUT = Trial(name="absent", taken=False, why="it is not installed")
TAKEN = Trial(name="better", taken=True, why="2.00 times as fast")


@pytest.fixture
def target(pair):
    """The tiny target of an engine."""
    return tiny_engine(pair).target


def test_a_target_confirms_kernels_that_are_right(target):
    """They stay."""
    proof = Proof(Kernels(), (TAKEN,))
    attend = target.attend
    assert confirm(proof, target) is proof
    assert target.attend is attend


@pytest.mark.parametrize(
    "kernel", [not_a_number, lambda *call: (attend_by_head(*call)[0] * -1, attend_by_head(*call)[1])]
)
def test_a_target_that_disagrees_goes_back_to_the_floor(kernel, target):
    """Its weights may show what random numbers did not; the record says so of every rung."""
    target.attend = kernel
    proof = confirm(Proof(Kernels(steps="better"), (TAKEN, LEFT_OUT)), target)
    assert proof.kernels == Kernels()
    assert target.attend is attend_by_head
    trial, other = proof.trials
    assert other is LEFT_OUT
    assert not trial.taken
    assert "with the target's own weights" in trial.why


def test_kernels_that_round_otherwise_are_not_refused(target):
    """Three percent on each attention are much more than any rounding, and change few first choices."""
    target.attend = a_little_wrong
    assert not what_is_wrong_in_logits(target, Graphs())


@pytest.fixture
def captured(pair):
    """The target of an engine whose steps can be captured."""
    return captured_engine(pair, "good", Graphs()).target


def test_a_target_runs_what_attends_to_steps_too(captured):
    """Prompts alone were read: the kernel of trees met the real weights in the first request."""

    def wrong_for_trees(q, k, v, span, scale):
        out, lse = attend_reference(q, k, v, span, scale)
        return (out if span.mask is None else -out), lse

    captured.attend = wrong_for_trees
    assert "differ" in what_is_wrong_in_logits(captured, Graphs())


def test_a_target_replays_its_graphs(captured):
    """They met the real weights in the first request, too."""

    def stale(name, function):
        outputs = tuple(torch.zeros_like(each) for each in function())
        return (lambda: None), outputs

    assert not what_is_wrong_in_logits(captured, Graphs(record, 1))
    assert "differ" in what_is_wrong_in_logits(captured, Graphs(stale, 1))


def test_a_first_choice_may_differ_where_two_are_nearly_tied():
    """Not where one leads."""
    expected = torch.tensor([[0.0, 1.0, 3.0, 3.05]])
    assert not compare_logits(expected + torch.tensor([0.0, 0.0, 0.1, 0.0]), expected)
    wide = torch.cat([torch.zeros(1, 500), torch.tensor([[10.0, 20.0]])], 1)
    swapped = torch.cat([torch.zeros(1, 500), torch.tensor([[16.0, 15.9]])], 1)
    assert compare_logits(swapped, wide)


@pytest.mark.parametrize("tree, names", [("auto", {"captured steps"}), ("hybrid", set())])
def test_a_gpu_takes_what_is_proven_for_its_batches_and_trees(tree, names, pair, monkeypatch):
    """Without a proof nothing but torch's own; a kernel that is named is taken without one."""
    asked = []

    def load_proof(subject, ladder):
        asked.append((subject, {rung.name for rung in ladder}))
        return Proof(Kernels(steps="triton", graphs=True), (TAKEN,))

    monkeypatch.setattr(loading, "load_proof", load_proof)
    options = {"attention__tree": tree, "decoding__max_batch_size": 3, "tree__nodes": 7}
    config = tiny_config(pair, job__gpus_per_worker=1, **options)
    facts = check_pair(config.target, config.active_draft)
    assert choose_kernels(config, facts).kernels.graphs
    [(subject, ladder)] = asked
    assert subject.batch == 4, "batches of 3 and 4 share a proof"
    assert subject.num_nodes == 7
    assert subject.device == "cuda"
    assert ladder & {"captured steps"} == names
    named = tiny_config(pair, attention__backend="sdpa", job__gpus_per_worker=1)
    assert choose_kernels(named, facts).kernels == Kernels()
    assert len(asked) == 1
