"""The check of a GPU: a stage that fails costs its own figures only, and every stage runs on a CPU with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specextend.attention.backends import attend_reference
from specextend.attention.layer_reference import REFERENCE
from specextend.bench.gpu_check import shapes, step_times
from specextend.bench.gpu_check.__main__ import STAGES
from specextend.bench.gpu_check.kernel_parity import CALLS, AttentionCall, compare_call
from specextend.bench.gpu_check.layer_parity import LAYERS, compare_layer
from specextend.bench.gpu_check.marked_tests import read_report
from specextend.bench.gpu_check.replayed_speed import RECORDING, read_recording, replay_documents
from specextend.bench.gpu_check.same_tokens import compare_tokens
from specextend.bench.gpu_check.stage import Setting, SkippedError, attempt, read_rows, write_json
from specextend.bench.gpu_check.supervisor import Stage, run_stages
from specextend.bench.gpu_check.synchronisations import count_by_line
from specextend.core import Completion
from specextend.decoding.graphs import Graphs
from specextend.stats import DecodingStats
from specextend.versions import code_sha256
from tests.recorded_graph import attend_on_device, record

ROOT = Path(__file__).parents[2]
ABSENT = ("ray", "gguf", "flash_attn", "rich", "pydantic", "jinja2", "matplotlib", "datasets", "accelerate")
"""What a machine may lack that has torch, transformers and pyarrow."""


def ending_of(name: str, out: Path, limit_s: float = 60) -> dict:
    """How one of the broken stages ends, as the summary has it."""
    ended = run_stages([Stage(name, f"tests.bench.broken_stages:{name}", limit_s)], "cpu", "tiny", out)
    return ended[name]


@pytest.mark.parametrize(
    ("name", "status", "reason", "num_rows"),
    [
        ("right", "ok", "", 2),
        ("wrong", "failed", "an error of 3", 2),
        ("raising", "failed", "RuntimeError: CUDA error: an illegal memory access", 1),
        ("dying", "failed", "code -9", 1),
        ("lacking", "skipped", "the package no_such_package is not installed", 0),
        ("impossible", "skipped", "this machine has no GPU", 0),
    ],
)
def test_a_stage_is_recorded_however_it_ends(tmp_path, monkeypatch, name, status, reason, num_rows):
    """A fault on a GPU takes the whole process with it; its message and the rows before it must stay."""
    monkeypatch.chdir(ROOT)
    ending = ending_of(name, tmp_path)
    assert ending["status"] == status
    assert reason in ending["reason"]
    assert ending["rows"] == num_rows
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert (kept["status"], kept["reason"], len(kept["rows"])) == (status, ending["reason"], num_rows)


def test_the_stages_behind_a_hanging_one_still_run(tmp_path, monkeypatch):
    """One kernel that never returns must not cost the figures of all others."""
    monkeypatch.chdir(ROOT)
    stages = [
        Stage(name, f"tests.bench.broken_stages:{name}", limit) for name, limit in (("hanging", 0.3), ("right", 60))
    ]
    ended = run_stages(stages, "cpu", "tiny", tmp_path)
    assert ended["hanging"]["status"] == "failed"
    assert ended["hanging"]["reason"] == "it exceeded its limit of 0.3 s"
    assert ended["right"]["status"] == "ok"
    assert read_rows(tmp_path, "right") == [{"shapes": "tiny"}, {"device": "cpu"}]


def setting(seconds: float) -> Setting:
    return Setting(device="cpu", shapes="tiny", out=Path("unused"), ends_at=time.monotonic() + seconds)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 64.00 GiB"), {"skipped": "out of memory"}),
        (SkippedError("no triton"), {"skipped": "no triton"}),
        (RuntimeError("out of resource: shared memory"), {"wrong": "RuntimeError: out of resource: shared memory"}),
    ],
)
def test_a_cell_that_fails_leaves_its_stage_going(error, outcome):
    """A kernel that does not fit one shape must not hide how fast it is at the others."""

    def measure():
        yield {"ms": 1}
        raise error

    assert list(attempt(setting(60), {"batch": 8}, measure)) == [{"batch": 8, "ms": 1}, {"batch": 8, **outcome}]


def test_a_cell_without_time_is_skipped():
    """What a stage could not reach is said, cell by cell, before its limit ends it."""
    assert list(attempt(setting(0), {"batch": 8}, pytest.fail)) == [{"batch": 8, "skipped": "no time is left"}]


def test_all_limits_together_are_under_nine_minutes():
    """And with the summary there are at most eight files."""
    assert sum(stage.limit_s for stage in STAGES) < 9 * 60
    assert len({stage.name for stage in STAGES}) == len(STAGES) <= 7


def imports_without(modules: list[str], absent: list[str]) -> subprocess.CompletedProcess:
    """Import modules in a new process in which some packages cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import {', '.join(modules)}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_summary_needs_the_standard_library_alone():
    """If torch itself cannot be imported, the summary is where that is said."""
    package = "specextend.bench.gpu_check"
    done = imports_without([f"{package}.__main__", f"{package}.stage_process"], ["torch", "numpy", *ABSENT])
    assert done.returncode == 0, done.stderr


def test_a_check_in_which_nothing_ran_has_failed(tmp_path):
    """With a Python that has no torch every stage is skipped; an exit code of 0 would look like a proof."""
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    environment = os.environ | {"PYTHON": str(tmp_path / "bare" / "bin" / "python"), "OUT": str(tmp_path / "out")}
    done = subprocess.run(["scripts/gpu_check.sh"], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 1


@pytest.mark.slow
def test_no_stage_needs_a_package_that_a_bare_machine_lacks():
    """The machine with the GPU has no network: what is missing there stays missing."""
    done = imports_without([stage.source.partition(":")[0] for stage in STAGES], [*ABSENT])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("factor", [1.0, 1.1, float("nan")])
def test_a_kernel_with_a_large_error_is_wrong(factor):
    """NaN too, although no comparison with it is true."""

    def kernel(*call):
        out, lse = attend_reference(*call)
        return out * factor, lse

    row = compare_call(kernel, AttentionCall("tree", (4, 2), 64, 5, (70, 0)), torch.bfloat16, torch.device("cpu"))
    assert ("wrong" in row) == (factor != 1.0)


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize("part", ["add_norm", "rotate_heads", "gate"])
def test_a_wrong_kernel_of_a_layer_is_found(part, factor):
    """Its twin, and the twin with one kernel that is a tenth off."""
    twin = getattr(REFERENCE, part)

    def kernel(*call):
        result = twin(*call)
        return tuple(each * factor for each in result) if isinstance(result, tuple) else result * factor

    row = compare_layer(replace(REFERENCE, **{part: kernel}), LAYERS[-1], torch.bfloat16, torch.device("cpu"))
    assert ("wrong" in row) == (factor != 1.0)


def test_the_calls_cover_what_kernels_go_wrong_at():
    """Heads that share keys or do not, both head sizes, no prefix, a block's edge, one query and the most."""
    assert {call.head_dim for call in CALLS} == {64, 128}
    assert {call.heads[0] // call.heads[1] for call in CALLS} >= {1, 3, 4, 7, 8}
    assert {0, 63, 64, 65} <= {prefix for call in CALLS for prefix in call.prefixes}
    assert {1, 51, 128} <= {call.num_queries for call in CALLS}


def completion(*token_ids: int) -> Completion:
    return Completion("", list(token_ids), "", "length", DecodingStats())


def test_an_output_that_differs_from_the_cpus_is_wrong():
    """The place of the first difference tells a near tie from a kernel that is wrong from the start."""
    expected = {"a": completion(1, 2, 3), "b": completion(4, 5)}
    row = compare_tokens({"a": completion(1, 2, 4), "b": completion(4, 5)}, expected)
    assert row["first_differences"] == {"a": 2}
    assert "wrong" in row
    assert "wrong" not in compare_tokens(expected, expected)


def test_synchronisations_are_counted_by_line():
    """Other warnings, such as a deprecation, are none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something is deprecated", stacklevel=1)
    [(line, count)] = count_by_line(caught).items()
    assert count == 3
    assert line.startswith(os.path.relpath(__file__))


def test_a_test_report_keeps_what_failed(tmp_path):
    """Of a file that cannot be imported, the message is only `collection failure`; the last line names the package."""
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="good" time="1.5"/>'
        '<testcase name="bad" time="2"><failure message="1 != 2">first\nlast</failure></testcase>'
        '<testcase name="left out" time="0"><skipped message="no triton"/></testcase></testsuite></testsuites>'
    )
    good, bad, left_out = read_report(report)
    assert good == {"test": "good", "seconds": 1.5}
    assert bad["wrong"] == "bad: 1 != 2 (last)"
    assert left_out["skipped"] == "no triton"


def cell(part: str, ms: float, **more: int) -> dict:
    return {"pair": "P", "backend": "sdpa", "tokens": 8192, "batch": 4, "part": part, "ms": {"median": ms}, **more}


def test_documents_an_hour_follow_from_times_and_recorded_steps(tmp_path, monkeypatch):
    """A step serves the whole batch, a prefill one document, and a retrieval several steps."""
    monkeypatch.chdir(ROOT)
    ms = {"plain": 20.0, "verify": 30.0, "draft": 10.0, "absorb": 2.0}
    steps = [cell(part, value) for part, value in ms.items()] + [cell("retrieve", 64.0, every=32)]
    prefills = [
        {"pair": "P", "tokens": 8192, "model": model, "ms": {"median": value}}
        for model, value in (("target", 900.0), ("target", 800.0), ("draft", 50.0))
    ]
    write_json(tmp_path / "steps.json", {"rows": steps})
    write_json(tmp_path / "prefill.json", {"rows": prefills})
    recording, [row] = read_recording(RECORDING), replay_documents(tmp_path)["rows"]
    assert row["step_ms"] == 30 + 10 + 2 + 64 / 32
    assert row["documents_per_hour"] == pytest.approx(3.6e6 / (850 + recording.steps * 44 / 4))
    assert row["plain_documents_per_hour"] == pytest.approx(3.6e6 / (800 + recording.decoded_tokens * 20 / 4))


def test_without_step_times_no_document_is_replayed(tmp_path, monkeypatch):
    """The stages that measure may have failed; a figure made of nothing would look like one."""
    monkeypatch.chdir(ROOT)
    assert replay_documents(tmp_path)["status"] == "skipped"


def test_the_parts_of_a_captured_step_are_measured_as_the_others_are(monkeypatch):
    """Without a GPU the graphs are recordings, which take other times, but must find everything in its place."""
    num_replays = 0

    def counting(function):
        replay, outputs = record(function)

        def counted() -> None:
            nonlocal num_replays
            num_replays += 1
            replay()

        return counted, outputs

    monkeypatch.setattr(shapes, "_graphs", lambda device: Graphs(counting))
    monkeypatch.setattr(shapes, "require_backend", lambda name, device: attend_on_device)
    monkeypatch.setattr(shapes, "load_layer_kernels", lambda name, device: None)
    monkeypatch.setattr(step_times, "PART_S", 0.0)
    pair = shapes.Pair(shapes.TINY[0], torch.device("cpu"), torch.float32)
    rows = list(step_times.StepParts(pair, shapes.GRAPHS, 2, 64).measure())
    assert [row["part"] for row in rows] == ["plain", "verify", "draft", "retrieve", "absorb"]
    assert num_replays > 12, "of four parts; retrieval is not captured"


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_with_tiny_shapes(tmp_path):
    """Time on a GPU is dear: what can fail on a CPU has to fail there first."""
    command = ["scripts/gpu_check.sh", "--device", "cpu", "--shapes", "tiny"]
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["code_sha256"] == code_sha256()
    skipped = {name for name, stage in summary["stages"].items() if stage["status"] == "skipped"}
    assert skipped == {"tests", "synchronisations"}
    assert all(stage["reason"] for name, stage in summary["stages"].items() if name in skipped)
    assert len(list(tmp_path.iterdir())) <= 8
    bandwidth = read_rows(tmp_path, "machine")[1]["bytes_per_s"]
    parts = {row["part"] for row in read_rows(tmp_path, "steps") if row["backend"] == "sdpa"}
    assert parts == {"plain", "verify", "draft", "absorb", "retrieve"}
    plain, base = (
        next(row for row in read_rows(tmp_path, "steps") if (row["backend"], row.get("part")) == (name, "plain"))
        for name in ("sdpa", "transformers sdpa")
    )
    assert plain["floor_ms"] == base["floor_ms"] > 1e3 * 256 * 8 * 2 * 2 * 64 * 2 / bandwidth
    layers = [row for row in read_rows(tmp_path, "kernels") if row.get("kernels") == "layer"]
    assert [row["skipped"] for row in layers] == ["attention.backend triton runs on a GPU only; choose auto"] * 10
    assert {row["backend"] for row in read_rows(tmp_path, "prefill")} == {"sdpa", "flash"}
    assert any(row["accepted_tokens"] for row in read_rows(tmp_path, "tokens") if "equal" in row)
    assert len(summary["stages"]["replay"]["rows"]) == 4
