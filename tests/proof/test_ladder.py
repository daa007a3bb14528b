"""A start proves its own kernels: a rung that is not right, or not faster, costs itself alone, and says why."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from specextend.attention.trials import Trial
from specextend.decoding import measurements
from specextend.proof import ladder as ladder_module
from specextend.proof.child import find_fault
from specextend.proof.ladder import Kernels, Proof, Rung, is_whole, load_proof, prove
from specextend.proof.subject import Subject
from tests.tiny_models import FAMILIES, tiny_model

BUSY = 17
"""The batch of a subject whose first proof runs out of time."""
NEVER = 600.0
"""Seconds that no proof here takes, however busy the machine is."""


@pytest.fixture
def subject() -> Subject:
    """A tiny model, in fp32, which all kernels of a CPU take."""
    return Subject(
        device="cpu",
        dtype="float32",
        model=tiny_model(FAMILIES["llama"], seed=0).config.to_dict(),
        num_nodes=8,
        depth=4,
        batch=2,
        longest=400,
        num_rows=2048,
        chunk=1024,
    )


def rung(kernel: str, field: str = "steps") -> Rung:
    return Rung(name=kernel, changes={field: f"tests.proof.faulty:{kernel}"}, judged_by=("plain", "tree"))


@pytest.mark.slow
def test_rungs_with_a_fault_are_left_out_and_named(subject):
    """The floor stays, and the rung behind each faulty one is tried all the same."""
    said = {
        "raises": "RuntimeError: no kernel image is available",
        "not_a_number": "out differs by nan",
        "a_little_wrong": "out differs by",
        "wrong_lse": "lse differs by 0.4",
        "dies": "SIGSEGV",
        "right_but_slow": "times as fast",
        "right_alone": "behind 63, 400",
    }
    proof = prove(subject, [rung(name) for name in said], NEVER)
    assert proof.kernels == Kernels()
    assert [trial.name for trial in proof.trials] == [*said]
    for trial in proof.trials:
        assert not trial.taken
        assert said[trial.name] in trial.why
        assert trial.is_wrong == (trial.name != "right_but_slow")


def test_a_kernel_is_tried_in_a_cache_that_just_holds_the_longest_request(subject):
    """As on a card with room for one: what does not fit is no fault of the kernel's."""
    full = replace(subject, batch=1, longest=512, num_rows=512)
    assert find_fault(full, Kernels(), Kernels(prompts="reference", steps="reference")) == ""


@pytest.mark.slow
def test_a_rung_that_is_right_and_faster_is_taken(subject):
    """What needs it is tried then."""
    base = replace(Kernels(), steps="tests.proof.faulty:right_but_slow")
    better = Rung(name="better", changes={"steps": "matmul"}, judged_by=("plain", "tree"))
    behind = replace(rung("raises"), needs="better")
    missing = replace(rung("raises"), name="missing", needs="nothing")
    absent = Rung(name="absent", changes={"prompts": "flash"}, judged_by=("prompt",))
    proof = prove(subject, [better, behind, missing, absent], NEVER, base)
    assert proof.kernels == replace(base, steps="matmul")
    assert [trial.taken for trial in proof.trials] == [True, False, False, False]
    assert [trial.is_wrong for trial in proof.trials] == [False, True, False, False]
    assert proof.trials[1].why == "RuntimeError: no kernel image is available"
    assert proof.trials[2].why == "it needs nothing"
    assert all(proof.trials[0].ms[name] > 0 and proof.trials[0].floor_ms[name] > 0 for name in ("plain", "tree"))


@pytest.mark.slow
def test_a_rung_that_hangs_ends_with_the_time_of_the_proof(subject):
    """So does everything behind it; the floor needs no proof."""
    proof = prove(subject, [rung("hangs"), rung("raises")], 8.0)
    assert proof.kernels == Kernels()
    assert [trial.taken for trial in proof.trials] == [False, False]
    assert "not done after" in proof.trials[0].why
    assert proof.trials[1].why == "no time was left to try it"
    assert not is_whole(asdict(proof))


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Count the proofs, which find nothing."""
    calls = []

    def prove_nothing(subject: Subject, *_: object) -> Proof:
        calls.append(subject)
        is_late = subject.batch == BUSY and len(calls) == 1
        return Proof(Kernels(prompts="flash"), (Trial(name="any", taken=False, why="", is_late=is_late),))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ladder_module, "prove", prove_nothing)
    monkeypatch.setattr(measurements, "measure_undisturbed", lambda measure: (measure(), True))
    return calls


def test_workers_of_a_node_share_one_proof(subject, counted):
    """They start together; the second one finds what the first has kept."""
    with ThreadPoolExecutor(4) as pool:
        proofs = [*pool.map(lambda _: load_proof(subject), range(4))]
    assert len(counted) == 1
    assert {json.dumps(proof.kernels.prompts) for proof in proofs} == {'"flash"'}


def test_a_proof_without_the_time_for_a_rung_is_not_kept(subject, counted):
    """Another job had the GPU that day; the kernel is tried again at the next start, and not after that."""
    busy = replace(subject, batch=BUSY)
    for _ in range(3):
        load_proof(busy)
    assert len(counted) == 2


@pytest.mark.parametrize("change", ["driver", "torch", "code", "shape"])
def test_a_kept_proof_is_not_used_after_a_change(change, subject, counted, tmp_path, monkeypatch):
    """What was right with one of them may be wrong with another."""
    load_proof(subject)
    if change == "driver":
        driver = tmp_path / "version"
        driver.write_text("NVRM version: 999\n")
        monkeypatch.setattr(ladder_module, "_DRIVER", driver)
    elif change == "torch":
        monkeypatch.setattr(ladder_module, "package_version", lambda name: "9.9")
    elif change == "code":
        monkeypatch.setattr(measurements, "code_sha256", lambda: "0")
    load_proof(replace(subject, batch=3) if change == "shape" else subject)
    assert len(counted) == 2
