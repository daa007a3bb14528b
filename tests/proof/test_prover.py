"""A start proves the kernels of its card: a kernel that is not right costs itself alone, and says why."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from specextend.attention.backends import Trial
from specextend.decoding import device, measurements
from specextend.models import loading
from specextend.models.loading import choose_kernels, load_engine, make_subject
from specextend.models.pairing import check_pair
from specextend.proof import prover
from specextend.proof.prover import FLASH, GRAPHS, LAYERS, TREES, Candidate, Kernels, Proof, load_proof, prove
from tests.proof.conftest import SUBJECT
from tests.tiny_models import tiny_config


def steps_by(kernel):
    return Candidate(name=kernel, field="steps", value=f"tests.proof.faulty:{kernel}")


@pytest.mark.slow
def test_what_dies_or_fails_is_out_and_the_rest_is_proven():
    """Another process goes on after the first that died; only a wrong result or a crash counts as wrong."""
    said = {
        "lacks_a_compiler": "not there yet: Failed to find C compiler",
        "dies": "it ended by SIGSEGV",
        "loses_its_device": "not there yet: CUDA error: unspecified launch failure",
        "lacks_memory": "not there yet: CUDA out of memory",
        "a_little_wrong": "out differs by",
    }
    candidates = [steps_by(name) for name in said]
    candidates += [Candidate(name="last", field="prompts", value="reference"), GRAPHS, FLASH]
    trials = prove(SUBJECT, candidates)
    assert [each.name for each in trials] == [*said, "last", GRAPHS.name, FLASH.name]
    for trial, why in zip(trials, said.values(), strict=False):
        assert why in trial.why
        assert trial.is_final == trial.is_wrong == (trial.name in ("dies", "a_little_wrong"))
    assert [each.taken for each in trials] == [False] * 5 + [True, False, False]
    assert [each.why for each in trials[6:]] == ["it needs Triton for trees", trials[7].why]
    assert "flash extra" in trials[7].why


@pytest.mark.slow
def test_what_hangs_is_ended_and_tried_again_at_the_next_start(monkeypatch):
    """The candidate after it is proven by another process."""
    monkeypatch.setattr(prover, "LIMIT_S", 20.0)
    hangs, after = prove(SUBJECT, [steps_by("hangs"), steps_by("not_a_number")])
    assert "not there yet: nothing came of it for 20 s" in hangs.why
    assert not hangs.is_final
    assert after.is_wrong


CANDIDATES = [steps_by("first"), steps_by("second")]


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """The names of candidates that were tried; `second` is not there at first."""
    names = []

    def run_apart(task):
        found = []
        for each in task["candidates"]:
            is_there = each["name"] != "second" or "second" in names
            names.append(each["name"])
            found.append(Trial(name=each["name"], taken=is_there, why="", is_final=is_there))
        return found

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prover, "run_apart", run_apart)
    return names


def test_what_could_not_be_built_is_tried_again_at_each_start_with_a_loud_line(tried, caplog):
    """A compiler that was missing was kept as a wrong kernel, for good."""
    for _ in range(3):
        proof = load_proof(SUBJECT, CANDIDATES)
    assert tried == ["first", "second", "second"]
    assert [each.taken for each in proof.trials] == [True, True]
    [loud] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert loud.startswith("second: left out")


def test_workers_of_a_node_share_one_proof(tried, monkeypatch):
    """They start together; all find what the first has found, even what was not there: for them it would not be."""
    started = Barrier(4)
    identity = prover.identity
    monkeypatch.setattr(prover, "identity", lambda subject: (started.wait(60), identity(subject))[1])
    with ThreadPoolExecutor(4) as pool:
        proofs = [*pool.map(lambda _: load_proof(SUBJECT, CANDIDATES), range(4))]
    assert tried == ["first", "second"]
    assert {proof.kernels.steps for proof in proofs} == {CANDIDATES[0].value}


@pytest.mark.parametrize("change", ["driver", "compiler", "torch", "code", "shape", "no folder"])
def test_a_kept_proof_is_not_used_after_a_change(change, tried, tmp_path, monkeypatch):
    """What was right with one of them may be wrong with another."""
    load_proof(SUBJECT, CANDIDATES[:1])
    (tmp_path / "other").write_text("#!/bin/sh\necho 'cc 99.9'\n")
    (tmp_path / "other").chmod(0o700)
    if change == "driver":
        monkeypatch.setattr(device, "DRIVER", tmp_path / "other")
    elif change == "compiler":
        monkeypatch.setenv("CC", str(tmp_path / "other"))
    elif change == "torch":
        monkeypatch.setattr(prover, "package_version", lambda name: "9.9")
    elif change == "code":
        monkeypatch.setattr(measurements, "code_sha256", lambda: "0")
    elif change == "no folder":  # a home that is read-only ended every worker of a node
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    load_proof(replace(SUBJECT, num_drafts=9) if change == "shape" else SUBJECT, CANDIDATES[:1])
    assert tried == ["first", "first"]


@pytest.fixture
def card(monkeypatch):
    """A virtual A100 of the mode `exclusive process`: once this process has a context, no other gets one."""
    contexts = []
    facts = SimpleNamespace(total_memory=80 << 30, multi_processor_count=108, major=8, minor=0, name="virtual A100")

    def opens(*_):
        contexts.append("a context")
        return 0, 80 << 30

    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device: facts,
        "get_device_capability": lambda device: (8, 0),
        "get_device_name": lambda device: facts.name,
        "mem_get_info": opens,
        "set_device": opens,
        "synchronize": opens,
        "empty_cache": opens,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return contexts


class ProvenError(Exception):
    """Ends a start once its kernels are proven."""


@pytest.mark.parametrize("tree, has_graphs", [("auto", True), ("hybrid", False)])
def test_a_start_and_the_check_prove_the_same_before_they_have_a_context(tree, has_graphs, pair, card, monkeypatch):
    """The check proved another batch than the run takes, and a child found the card taken by its parent."""
    asked = []

    def proven(subject, candidates):
        assert not card, "the child would be refused"
        asked.append((subject, candidates))
        return Proof(Kernels())

    monkeypatch.setattr(loading, "load_proof", proven)
    monkeypatch.setattr(loading, "load_cached_target", lambda *_: (_ for _ in ()).throw(ProvenError))
    options = {"attention__tree": tree, "job__gpus_per_worker": 1, "tree__nodes": 7}
    config = tiny_config(pair, **options, decoding__max_batch_size=32)
    with pytest.raises(ProvenError):
        load_engine(config)
    loading.try_kernels(tiny_config(pair, **options, decoding__max_batch_size="auto"))
    started, checked = asked
    assert started == checked
    subject, candidates = started
    assert candidates == [TREES, LAYERS, FLASH, *[GRAPHS] * has_graphs]
    assert subject.num_drafts == 7


def test_a_head_has_a_say_in_what_is_proven_and_a_named_kernel_needs_no_proof(pair, card):
    """A head's own shape meets the same kernels; whoever names a kernel takes it."""
    config = tiny_config(pair, "eagle", job__gpus_per_worker=1, attention__backend="sdpa")
    facts = check_pair(config.target, config.active_draft)
    target, head = make_subject(config, facts).layers
    assert target != head
    assert choose_kernels(config, facts).kernels == Kernels()
    assert not card


@pytest.mark.parametrize(
    "driver, named",
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build", ()),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", ("nvidia-driver-580-server",)),
    ],
)
def test_what_a_bare_machine_lacks_is_named_with_its_package(driver, named, tmp_path, monkeypatch):
    """A kernel that cannot be built is otherwise a line of a compiler, hours into an evening."""
    (tmp_path / "version").write_text(driver)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    missing = device.what_is_missing()
    assert len(missing) == len(named) + 2
    for package in (*named, "apt-get install gcc", "-dev"):
        assert any(package in each for each in missing)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "absent")
    assert device.what_is_missing() == [], "a machine without a GPU needs none of it"
