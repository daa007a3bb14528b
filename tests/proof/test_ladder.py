"""A start proves its own kernels: a rung that is not right, or not faster, costs itself alone, and says why."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from specextend.attention.backends import Trial
from specextend.decoding import measurements
from specextend.proof import ladder as ladder_module
from specextend.proof.child import compare_tokens, find_fault
from specextend.proof.ladder import Kernels, Rung, load_proof, prove
from specextend.proof.subject import Subject
from tests.recorded_graph import record
from tests.tiny_models import FAMILIES, tiny_model

BUSY = 17
"""The batch of a subject whose first proof runs out of time."""
NEVER = 600.0
"""Seconds that no proof here takes, however busy the machine is."""


@pytest.fixture
def subject():
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


def rung(kernel, field="steps"):
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
        "lacks_memory": "OutOfMemoryError: CUDA out of memory",
        "loses_its_device": "RuntimeError: CUDA error: unspecified launch failure",
    }
    proof = prove(subject, [rung(name) for name in said], NEVER)
    assert proof.kernels == Kernels()
    assert [trial.name for trial in proof.trials] == [*said]
    for trial in proof.trials:
        assert not trial.taken
        assert said[trial.name] in trial.why
        assert trial.is_wrong == (trial.name != "right_but_slow")
        assert trial.is_late == (trial.name in ("lacks_memory", "loses_its_device")), "another try is due"


def test_a_kernel_is_tried_in_a_cache_that_just_holds_the_longest_request(subject):
    """As on a card with room for one: what does not fit is no fault of the kernel's."""
    full = replace(subject, batch=1, longest=512, num_rows=512)
    assert find_fault(full, Kernels(), Kernels(prompts="reference", steps="reference")) == ""


@pytest.mark.parametrize("is_right", [True, False])
def test_captured_steps_whose_drafts_read_other_rows_are_found(is_right, subject):
    """Every token is right, nobody accepts a draft, and plain decoding would be faster."""
    steps = "tests.recorded_graph:attend_on_device" if is_right else "tests.proof.faulty:reads_other_rows"
    wrong = compare_tokens(subject, Kernels(steps=steps), record)
    assert wrong == "" if is_right else "draft tokens are accepted in batches of 1" in wrong


@pytest.mark.slow
def test_a_rung_that_is_right_and_faster_is_taken(subject):
    """What needs it is tried then."""
    base = replace(Kernels(), steps="tests.proof.faulty:right_but_slow")
    better = Rung(name="better", changes={"steps": "sdpa"}, judged_by=("plain", "tree"))
    behind = replace(rung("raises"), needs="better")
    missing = replace(rung("raises"), name="missing", needs="nothing")
    absent = Rung(name="absent", changes={"prompts": "flash"}, judged_by=("prompt",))
    proof = prove(subject, [better, behind, missing, absent], NEVER, base)
    assert proof.kernels == replace(base, steps="sdpa")
    assert [trial.taken for trial in proof.trials] == [True, False, False, False]
    assert [trial.is_wrong for trial in proof.trials] == [False, True, False, False]
    assert proof.trials[1].why == "RuntimeError: no kernel image is available"
    assert proof.trials[2].why == "it needs nothing"
    assert all(proof.trials[0].ms[name] > 0 and proof.trials[0].base_ms[name] > 0 for name in ("plain", "tree"))


@pytest.mark.slow
def test_a_rung_that_hangs_ends_with_the_time_of_the_proof(subject):
    """So does everything behind it; the floor needs no proof."""
    proof = prove(subject, [rung("hangs"), rung("raises")], 8.0)
    assert proof.kernels == Kernels()
    assert [trial.taken for trial in proof.trials] == [False, False]
    assert "not done after" in proof.trials[0].why
    assert proof.trials[1].why == "no time was left to try it"
    assert all(trial.is_late for trial in proof.trials)


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Count the rungs that are tried, which are left out; `BUSY` batches have no time for the second one at first."""
    calls = []

    def try_apart(subject, base, rung, limit_s):
        is_late = subject.batch == BUSY and rung.name == "second" and not any(call[1] == "second" for call in calls)
        calls.append((subject, rung.name))
        return Trial(name=rung.name, taken=rung.name == "first", why="", is_late=is_late)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ladder_module, "try_apart", try_apart)
    monkeypatch.setattr(measurements, "measure_undisturbed", lambda measure: (measure(), True))
    return calls


RUNGS = [
    Rung(name="first", changes={"prompts": "flash"}, judged_by=("prompt",)),
    Rung(name="second", changes={"steps": "triton"}, judged_by=("tree",)),
]


def load(subject):
    return load_proof(subject, RUNGS)


@pytest.mark.parametrize("batch", [2, BUSY])
def test_workers_of_a_node_share_one_proof(batch, subject, counted, monkeypatch):
    """They start together; all find what the first has found, even if its time ran out: theirs would, too."""
    started = Barrier(4)
    identity = ladder_module.identity
    monkeypatch.setattr(ladder_module, "identity", lambda about: (started.wait(60), identity(about))[1])
    with ThreadPoolExecutor(4) as pool:
        proofs = [*pool.map(load, [replace(subject, batch=batch)] * 4)]
    assert len(counted) == 2
    assert {proof.kernels for proof in proofs} == {Kernels(prompts="flash")}


def test_a_proof_without_the_time_for_a_rung_goes_on_at_the_next_start(subject, counted):
    """Another job had the GPU that day; the kernel is tried again at the next start, not after that, and no other."""
    busy = replace(subject, batch=BUSY)
    for _ in range(3):
        load(busy)
    assert [name for _, name in counted] == ["first", "second", "second"]


def test_without_a_folder_to_write_a_start_proves_all_the_same(subject, counted, tmp_path, monkeypatch):
    """A home that is read-only, or full, or no folder, ended every worker of a node."""
    no_folder = tmp_path / "file"
    no_folder.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    assert load(subject).kernels == Kernels(prompts="flash")
    assert len(counted) == 2


@pytest.mark.parametrize("change", ["driver", "torch", "code", "shape"])
def test_a_kept_proof_is_not_used_after_a_change(change, subject, counted, tmp_path, monkeypatch):
    """What was right with one of them may be wrong with another."""
    load(subject)
    if change == "driver":
        driver = tmp_path / "version"
        driver.write_text("NVRM version: 999\n")
        monkeypatch.setattr(ladder_module, "_DRIVER", driver)
    elif change == "torch":
        monkeypatch.setattr(ladder_module, "package_version", lambda name: "9.9")
    elif change == "code":
        monkeypatch.setattr(measurements, "code_sha256", lambda: "0")
    load(replace(subject, batch=3) if change == "shape" else subject)
    assert len(counted) == 4
