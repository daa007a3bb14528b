"""What stands still: a document, a worker, the whole job."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from specextend import config
from specextend.cluster import workers
from specextend.cluster.exits import EXIT_DONE, EXIT_FAILED, EXIT_TOO_MANY_ERRORS, RunError, exit_code
from tests.cluster.fakes import FakeEngine
from tests.faults.conftest import during
from tests.faults.nodes import CPUS

GOOD = [f"text number {number} " * (number + 1) for number in range(4)]


def never_ready(config):
    """A model whose file system never answers."""
    threading.Event().wait()


@pytest.mark.slow
def test_a_document_past_its_deadline_is_dropped_and_its_neighbours_go_on(job):
    """On the same worker, between two steps."""
    run = job([*GOOD, "crawl"], max_attempts=2, document_deadline_s=8.0)
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [late] = run.errors().values()
    assert (late["doc_id"], late["error_class"], late["attempts"]) == ("d4", "DeadlineExceeded", 2)
    assert [facts["document"] for facts in run.screen.told("document_cancelled")] == ["d4"] * 2
    assert set(run.summaries()) == {f"d{row}" for row in range(4)}
    assert len(set(run.column("worker"))) == 1
    assert not run.screen.told("worker_died") + run.screen.told("worker_killed")


@dataclass(frozen=True)
class LoadsTheSecondTime:
    """A model whose file system does not answer the first worker."""

    marker: Path

    def __call__(self, config):
        if self.marker.exists():
            return FakeEngine(config)
        self.marker.touch()
        return never_ready(config)


@pytest.mark.slow
def test_a_worker_that_hangs_while_it_loads_is_replaced(job, monkeypatch, tmp_path):
    """It kept its GPU for the rest of the night, and the run went on with one worker less."""
    monkeypatch.setattr(workers, "START_S", 10.0)
    run = job(GOOD)
    assert run.run(LoadsTheSecondTime(tmp_path / "hung")) == EXIT_DONE
    notes = [note for note in run.screen.notes if "could not be built" in note]
    assert notes
    assert all("its models were not loaded within 10 s (on " in note for note in notes)
    assert set(run.column("attempts")) == {1}


@pytest.mark.slow
def test_a_worker_that_waits_for_a_machine_does_not_load_yet(job, monkeypatch, nodes):
    """A cluster may take ten minutes to grow, and its models a minute to load."""
    monkeypatch.setattr(workers, "START_S", 10.0)
    run = job(GOOD, cpus_per_worker=CPUS)
    began = time.monotonic()

    def grow():
        if time.monotonic() - began < 12:
            return False
        assert not any("could not be built" in note for note in run.screen.notes)
        return nodes.add()

    during(run, grow)
    assert run.run() == EXIT_DONE


def test_a_job_in_which_no_worker_comes_up_fails_and_names_what_waits(job, monkeypatch):
    """Without an end of its own it would wait until somebody looks."""
    monkeypatch.setattr(config, "LEAST_SILENCE_S", 1.0)
    run = job(GOOD)
    places = ", ".join(f"input.parquet:{row}" for row in (3, 2, 1, 0))
    with pytest.raises(RunError, match=f"^no token for 2 s: no worker is ready; waiting: {places}; ") as end:
        run.run(never_ready, stall_s=1, max_attempts=1)
    assert exit_code(end.value) == EXIT_FAILED
    assert not (run.output / "_run" / "lock").exists()
    assert run.run() == EXIT_DONE
