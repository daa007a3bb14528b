"""The check of a GPU: what fails in it is said, and every stage that needs no GPU runs on a CPU with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import AttentionCall, compare_call
from specextend.attention.reference import attend_reference

ROOT = Path(__file__).parents[2]
ABSENT = [
    *("ray", "gguf", "flash_attn", "rich", "jinja2", "matplotlib"),
    *("pandas", "pyarrow", "datasets", "accelerate", "pydantic"),
]
"""What a machine may lack that has torch and transformers."""
CPU = torch.device("cpu")


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


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_with_tiny_shapes(tmp_path):
    """What can fail on a CPU has to fail there first."""
    command = ["scripts/gpu_check.sh", "--device", "cpu", "--shapes", "tiny"]
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: stage["status"] for name, stage in summary["stages"].items()} == dict.fromkeys(gpu_check.STAGES, "ok")
    rows = {
        name: list(map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())) for name in gpu_check.STAGES
    }
    assert rows["machine"][1]["flop_per_s"] > 0
    assert all("skipped" in row for row in rows["kernels"] if row["backend"] in ("triton", "flash", "layer"))
    assert all("out_error" in row for row in rows["kernels"] if row["backend"] == "sdpa")
    assert any(row["accepted"] for row in rows["tokens"] if "requests" in row)
    assert {(row["backend"], row["draft"]) for row in rows["steps"] if "step_ms" in row} >= {
        ("sdpa", False),
        ("sdpa", True),
    }
