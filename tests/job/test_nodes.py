"""Nodes that go away, as spot machines do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.job.conftest import LONGEST_S, ROOT, environment, long_corpus, pausing_command, rows, wait_for_pause

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[tuple[str, Callable[[str], None]]]:
    """A cluster's address, and how to tell it to add or kill a node."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "tests.job.nodes"], env=environment(), cwd=ROOT, **pipes)

    def tell(what: str) -> None:
        process.stdin.write(f"{what}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    yield process.stdout.readline().strip(), tell
    process.communicate(timeout=LONGEST_S)


def test_a_node_that_dies_charges_no_document(nodes: tuple[str, Callable[[str], None]], tmp_path: Path):
    """A reclaimed machine is nobody's fault: its documents are done elsewhere, at their first attempt."""
    address, tell = nodes
    tell("add")
    output = tmp_path / "out"
    arguments = [*long_corpus(tmp_path), "--output", str(output), "--config", "configs/tiny-random.yaml"]
    job = subprocess.Popen(
        pausing_command(*arguments),
        env=environment() | {"RAY_ADDRESS": address},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_pause(job)
    tell("kill")
    job.send_signal(signal.SIGCONT)
    tell("add")
    _, stderr = job.communicate(timeout=LONGEST_S)
    assert job.returncode == 0, stderr
    done = rows(output / "summaries")
    assert len(done) == 40
    assert {row["attempts"] for row in done} == {1}
    assert len({row["worker"] for row in done}) == 2
