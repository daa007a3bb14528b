"""The check of a GPU: what fails in it is said, and every stage that needs no GPU runs on a CPU with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import (
    CALLS,
    LAYERS,
    LIMITS_S,
    SKIPPED,
    AttentionCall,
    Setting,
    attempt,
    compare_call,
    compare_layer,
    compare_tokens,
    run_stage,
    supervise,
)
from benchmarks.gpu_pairs import SkippedError
from specextend.attention.backends import attend_reference
from specextend.attention.layer_reference import REFERENCE
from specextend.core import Completion
from specextend.stats import DecodingStats

ROOT = Path(__file__).parents[2]
ABSENT = (
    "ray",
    "gguf",
    "flash_attn",
    "rich",
    "jinja2",
    "matplotlib",
    "pandas",
    "pyarrow",
    "datasets",
    "accelerate",
    "pydantic",
)
"""What a machine may lack that has torch, transformers and pydantic."""
CPU = torch.device("cpu")


def setting(seconds: float = 60) -> Setting:
    return Setting(device=CPU, tiny=True, ends_at=time.monotonic() + seconds)


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
        raise error

    assert attempt(setting(), {"batch": 8}, measure) == {"batch": 8, **outcome}
    assert attempt(setting(-1), {"batch": 8}, pytest.fail) == {"batch": 8, "skipped": "no time is left"}


@pytest.mark.parametrize(
    ("rows", "code"),
    [([{"ms": 1}], 0), ([{"ms": 1}, {"wrong": "3 is too much"}], 1), ([{"skipped": "no GPU"}], SKIPPED), ([], SKIPPED)],
)
def test_a_stage_keeps_its_rows_and_fails_if_one_is_wrong(rows, code, tmp_path, monkeypatch):
    """A stage that could run nothing at all is told from one that found all well."""
    monkeypatch.setitem(gpu_check.STAGES, "machine", lambda given: iter(rows))
    assert run_stage("machine", setting(), tmp_path) == code
    assert [json.loads(line) for line in (tmp_path / "machine.jsonl").read_text().splitlines()] == rows


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("pass", "ok", ""),
        ("raise SystemExit('an illegal memory access')", "failed", "an illegal memory access"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "it ended with signal 9"),
        (f"print('no GPU'); raise SystemExit({SKIPPED})", "skipped", "no GPU"),
    ],
)
def test_a_stage_is_recorded_however_it_ends(code, status, reason):
    """A fault on a GPU takes the whole process with it; the stages behind it still run."""
    ended = supervise([sys.executable, "-c", code], 60)
    assert ended["status"] == status
    assert reason in ended["reason"]


def test_a_stage_that_hangs_is_ended():
    """One kernel that never returns must not cost the figures of all others."""
    ended = supervise([sys.executable, "-c", "import time; time.sleep(600)"], 0.3)
    assert (ended["status"], ended["reason"]) == ("failed", "it exceeded its limit of 0.3 s")


def test_all_limits_together_are_under_nine_minutes():
    """Time on such a machine is dear."""
    assert sum(LIMITS_S.values()) < 9 * 60


def test_a_check_in_which_nothing_ran_has_failed(tmp_path):
    """With a Python that has no torch there is nothing to run; an exit code of 0 would look like a proof."""
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    environment = os.environ | {"PYTHON": str(tmp_path / "bare" / "bin" / "python"), "OUT": str(tmp_path / "out")}
    done = subprocess.run(["scripts/gpu_check.sh"], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"No module named 'torch'" in done.stderr


@pytest.mark.slow
def test_no_stage_needs_a_package_that_a_bare_machine_lacks():
    """The machine with the GPU has no network: what is missing there stays missing."""
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); import benchmarks.gpu_check"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("factor", [1.0, 1.1, float("nan")])
def test_a_kernel_with_a_large_error_is_wrong(factor):
    """NaN too, although no comparison with it is true."""

    def kernel(*call):
        out, lse = attend_reference(*call)
        return out * factor, lse

    row = compare_call(kernel, AttentionCall("tree", (4, 2), 64, 5, (70, 0)), torch.bfloat16, CPU)
    assert ("wrong" in row) == (factor != 1.0)


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize("part", ["add_norm", "rotate_heads", "gate"])
def test_a_wrong_kernel_of_a_layer_is_found(part, factor):
    """Its twin, and the twin with one kernel that is a tenth off."""
    twin = getattr(REFERENCE, part)

    def kernel(*call):
        result = twin(*call)
        return tuple(each * factor for each in result) if isinstance(result, tuple) else result * factor

    row = compare_layer(replace(REFERENCE, **{part: kernel}), LAYERS[-1], torch.bfloat16, CPU)
    assert ("wrong" in row) == (factor != 1.0)


def test_the_calls_cover_what_kernels_go_wrong_at():
    """Heads that share keys or do not, both head sizes, no prefix, a block's edge, one query and the most."""
    assert {call.head_dim for call in CALLS} == {64, 128}
    assert {call.heads[0] // call.heads[1] for call in CALLS} >= {1, 3, 4, 7, 8}
    assert {0, 63, 64, 65} <= {prefix for call in CALLS for prefix in call.prefixes}
    assert {1, 51, 128} <= {call.num_queries for call in CALLS}


def test_an_output_that_differs_from_the_cpus_is_wrong():
    """By name of the request, of which each has another length."""
    expected = {name: Completion("", [1, 2, 3], "", "length", DecodingStats()) for name in "ab"}
    found = expected | {"b": replace(expected["b"], token_ids=[1, 2, 4])}
    assert compare_tokens(found, expected)["wrong"] == "tokens of b differ from the CPU's"
    assert "wrong" not in compare_tokens(expected, expected)


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_with_tiny_shapes(tmp_path):
    """What can fail on a CPU has to fail there first."""
    command = ["scripts/gpu_check.sh", "--device", "cpu", "--shapes", "tiny"]
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: stage["status"] for name, stage in summary["stages"].items()} == dict.fromkeys(gpu_check.STAGES, "ok")
    rows = {name: list(map(json.loads, (tmp_path / f"{name}.jsonl").open())) for name in gpu_check.STAGES}
    assert rows["machine"][1]["flop_per_s"] > 0
    assert all("skipped" in row for row in rows["kernels"] if row["backend"] in ("triton", "flash", "layer"))
    assert all("out_error" in row for row in rows["kernels"] if row["backend"] == "sdpa")
    assert any(row["accepted"] for row in rows["tokens"] if "requests" in row)
    assert {(row["backend"], row["draft"]) for row in rows["steps"] if "step_ms" in row} >= {
        ("sdpa", False),
        ("sdpa", True),
    }
