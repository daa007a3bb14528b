"""The check of a GPU, tried on a CPU with tiny shapes: what can fail there has to fail there first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = [
    *("ray", "gguf", "flash_attn", "jinja2", "matplotlib", "pandas"),
    *("pyarrow", "datasets", "accelerate", "pydantic", "llguidance"),
]
"""What a machine may lack that has torch and transformers."""
TINY = ("--device", "cpu", "--shapes", "tiny")


@pytest.mark.slow
def test_neither_the_check_nor_a_rung_needs_a_package_that_a_bare_machine_lacks():
    """The machine with the GPU has no network: what is missing there stays missing."""
    modules = "benchmarks.gpu_check, benchmarks.gpu_steps, specextend.proof.child"
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); import {modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_check_says_of_each_rung_what_a_start_would(tmp_path):
    """On a CPU no rung can run, which is no fault."""
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["scripts/gpu_check.sh", *TINY]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["limits"]["flop_per_s"] > 0
    [path] = {*tmp_path.glob("*.json")} - {tmp_path / "summary.json"}
    trials = json.loads(path.read_text())["trials"]
    assert [trial["taken"] for trial in trials] == [False] * 4
    assert [trial["is_wrong"] for trial in trials] == [False] * 4
    assert "captured steps: left out, it needs Triton for trees" in done.stdout


@pytest.mark.slow
def test_steps_are_measured_with_and_without_a_draft():
    """Combinations that a CPU lacks say why."""
    command = [sys.executable, "-m", "benchmarks.gpu_steps", *TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["backend"], row["draft"]) for row in rows if "step_ms" in row} == {("sdpa", False), ("sdpa", True)}
    assert all("GPU" in row["skipped"] or "flash" in row["skipped"] for row in rows if "step_ms" not in row)
