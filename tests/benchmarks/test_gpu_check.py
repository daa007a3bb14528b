"""The check of a GPU, tried on a CPU with tiny shapes: what can fail there has to fail there first."""

import json
import os
import re
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_check import LIMITS_S, PYTEST, run_limited
from tests.job.conftest import ran

BARE = ("torch", "transformers", "triton", "numpy")
"""What the machine with the GPU has. It has no network: what is missing there stays missing."""
ABSENT = {"pydantic", "rich"}
"""What packages of those ask for, and do without."""
TINY = ("--device", "cpu", "--shapes", "tiny")


def needed(names, found=frozenset()):
    """The packages of these names, and those that they need in turn."""
    for name in names:
        if name in found or name in ABSENT:
            continue
        found |= {name}
        asked = [Requirement(text) for text in distribution(name).requires or ()]
        wanted = [each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
        found = needed([each for each in wanted if is_there(each)], found)
    return found


def is_there(name):
    """Whether a package is installed."""
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def bare_machine(folder, *packages):
    """A Python that finds these packages and what they need, and nothing else."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    there = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
    for name in needed(packages):
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = there / top
            if not link.exists():
                link.symlink_to(distribution(name).locate_file(top))
    return str(python)


@pytest.mark.slow
def test_the_check_leaves_what_each_part_found_on_a_bare_machine(tmp_path):
    """On a CPU no candidate can run, which is no fault; names are such that any machine takes them, and files are few.

    Without pytest its own parts fail and say so; the others go on.
    """
    out = tmp_path / "out"
    environment = os.environ | {"PYTHON": bare_machine(tmp_path / "bare", *BARE), "OUT": str(out)}
    done = ran("scripts/gpu_check.sh", *TINY, env=environment)
    files = sorted(path.name for path in out.iterdir())
    assert len(files) <= 8
    assert all(re.fullmatch(r"[a-z0-9_-][a-z0-9._-]*", name) for name in files)
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    parts = found["summary"]["parts"]
    codes = dict.fromkeys(LIMITS_S, 0) | {"kernels": 1, "tiny-pair": 1}
    assert {name: part["code"] for name, part in parts.items()} == codes, done.stdout + done.stderr
    assert "No module named pytest" in parts["kernels"]["said"]
    proof, limits = found["proof"]
    assert limits["limits"]["flop_per_s"] > 0
    assert [trial["taken"] or trial["is_wrong"] or not trial["is_final"] for trial in proof["trials"]] == [False] * 4
    assert proof["trials"][-1]["why"] == "it needs Triton for trees"
    assert "Triton for trees: left out" in (out / "said.txt").read_text()
    assert [row["tokens"] for row in found["steps"] if "step_ms" in row] == [256]
    assert [row["of"] for row in found["profile"] if "operators" in row] == ["steps", "a prompt and steps"]


def test_the_parts_take_less_than_eight_minutes():
    """A card is lent for so long, and a part that is late costs itself alone."""
    assert sum(LIMITS_S.values()) < 8 * 60


def test_what_a_part_said_is_kept_when_its_time_is_up(tmp_path):
    """A machine is gone after the check, and what it said with it; what the part started ends with it."""
    code = """
import threading
print('the first result', flush=True)
try:
    threading.Event().wait()
finally:
    print('ended what it began', flush=True)
"""
    log = tmp_path / "said.txt"
    log.write_text("an earlier part\n")
    exit_code, said = run_limited([sys.executable, "-c", code], 5.0, log)
    assert exit_code != 0
    assert said.startswith("the first result\nended what it began")
    assert "not done after 5 s" in said
    assert log.read_text().startswith("an earlier part\nthe first result")


@pytest.mark.slow
def test_tests_of_a_gpu_can_be_read_on_a_bare_machine(tmp_path):
    """One that could not be imported stopped all others."""
    command = [bare_machine(tmp_path, *BARE, "pytest"), "-m", "pytest", "tests/gpu", *PYTEST, "--collect-only"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": "."}
    assert "test_cuda_engine.py" in ran(*command, env=environment).exits(0).stdout


@pytest.mark.slow
def test_steps_are_measured_with_and_without_a_draft():
    """Combinations that a CPU lacks say why."""
    done = ran(sys.executable, "-m", "benchmarks.gpu_steps", *TINY).exits(0)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["backend"], row["draft"]) for row in rows if "step_ms" in row} == {("sdpa", False), ("sdpa", True)}
    assert all("GPU" in row["skipped"] or "flash" in row["skipped"] for row in rows if "step_ms" not in row)
