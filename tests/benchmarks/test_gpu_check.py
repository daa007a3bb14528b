"""The check of a GPU, tried on a CPU with tiny shapes: what can fail there has to fail there first."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check import LIMITS_S, PYTEST, run_limited

ROOT = Path(__file__).parents[2]
ABSENT = [
    *("ray", "gguf", "flash_attn", "jinja2", "matplotlib", "pandas"),
    *("pyarrow", "datasets", "accelerate", "pydantic", "llguidance", "hypothesis", "numba", "duckdb"),
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
def test_the_check_leaves_what_each_part_found(tmp_path):
    """On a CPU no rung can run, which is no fault; names are such that any machine takes them, and files are few."""
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["scripts/gpu_check.sh", *TINY]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) <= 8
    assert all(re.fullmatch(r"[a-z0-9._-]+", name) for name in files)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {name: part["code"] for name, part in found["summary"]["parts"].items()} == dict.fromkeys(LIMITS_S, 0)
    [proof] = found["proof-batch-16"]
    assert proof["limits"]["flop_per_s"] > 0
    assert [trial["taken"] for trial in proof["trials"]] == [False] * 4
    assert [trial["is_wrong"] for trial in proof["trials"]] == [False] * 4
    assert "captured steps: left out, it needs Triton for trees" in done.stdout
    assert [row["tokens"] for row in found["steps"] if "step_ms" in row] == [256]
    assert [row["of"] for row in found["profile"] if "operators" in row] == ["steps", "a prompt and steps"]


def test_the_parts_take_less_than_eight_minutes():
    """A card is lent for so long, and a part that is late costs itself alone."""
    assert sum(LIMITS_S.values()) < 8 * 60


def test_what_a_part_said_is_kept_when_its_time_is_up():
    """A machine is gone after the check, and what it said with it."""
    code = "import threading; print('the first result', flush=True); threading.Event().wait()"
    exit_code, said = run_limited([sys.executable, "-c", code], 5.0)
    assert exit_code != 0
    assert said.startswith("the first result")


@pytest.mark.slow
def test_tests_of_a_gpu_can_be_read_without_what_a_bare_machine_lacks():
    """One that could not be imported stopped all others."""
    code = f"""
import sys, pytest

class Absent:
    def find_spec(name, *_):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent)
sys.exit(pytest.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "tests/gpu", *PYTEST, "--collect-only"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "test_cuda_engine.py" in done.stdout


@pytest.mark.slow
def test_steps_are_measured_with_and_without_a_draft():
    """Combinations that a CPU lacks say why."""
    command = [sys.executable, "-m", "benchmarks.gpu_steps", *TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["backend"], row["draft"]) for row in rows if "step_ms" in row} == {("sdpa", False), ("sdpa", True)}
    assert all("GPU" in row["skipped"] or "flash" in row["skipped"] for row in rows if "step_ms" not in row)
