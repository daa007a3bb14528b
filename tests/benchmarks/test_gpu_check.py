"""The check of a GPU, tried on a CPU with tiny shapes: what can fail there has to fail there first."""

import json
import sys

import pytest

from benchmarks.gpu_check import LIMITS_S, run_limited
from tests.job.conftest import ran

TINY = ("--device", "cpu", "--shapes", "tiny")


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
def test_steps_are_measured_with_and_without_a_draft():
    """Combinations that a CPU lacks say why."""
    done = ran(sys.executable, "-m", "benchmarks.gpu_steps", *TINY).exits(0)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["backend"], row["draft"]) for row in rows if "step_ms" in row} == {("sdpa", False), ("sdpa", True)}
    assert all("GPU" in row["skipped"] or "flash" in row["skipped"] for row in rows if "step_ms" not in row)
