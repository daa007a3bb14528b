"""The check of a GPU, tried on a CPU with tiny shapes: what can fail there has to fail there first."""

import json
import sys

import pytest

from benchmarks.gpu_check import LIMITS_S
from tests.job.conftest import ran

TINY = ("--device", "cpu", "--shapes", "tiny")


def test_the_parts_take_less_than_eight_minutes():
    """A card is lent for so long, and a part that is late costs itself alone."""
    assert sum(LIMITS_S.values()) < 8 * 60


@pytest.mark.slow
def test_steps_are_measured_with_and_without_a_draft():
    """Combinations that a CPU lacks say why."""
    done = ran(sys.executable, "-m", "benchmarks.gpu_steps", *TINY).exits(0)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["backend"], row["draft"]) for row in rows if "step_ms" in row} == {("sdpa", False), ("sdpa", True)}
    assert all("GPU" in row["skipped"] or "flash" in row["skipped"] for row in rows if "step_ms" not in row)
