"""Nights on GPUs some of which are broken, with the real driver over workers that are made up."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from specextend.cluster.backlog import TokenEstimate
from specextend.cluster.exits import WorkersFailError
from specextend.cluster.scheduler import MAX_DEATHS
from specextend.cluster.workers import MAX_FRUITLESS_DEATHS
from specextend.config import JobOptions
from specextend.core import DocumentKey
from specextend.data.commits import read_commits
from specextend.data.storage import resolve
from tests.cluster.conftest import Screen
from tests.job.conftest import rows as rows_of
from tests.properties.rows import source_of
from tests.properties.simulated import Clock, SimulatedPool, driver_of

GPUS = 8


@dataclass
class Night:
    """What a run came to."""

    failed: set[int]
    """Rows that are error rows."""
    attempts: Counter[int]
    """Rows by attempts."""
    deaths: Counter[int]
    """Workers that died, by GPU."""
    screen: Screen


def night(
    folder,
    interrupt,
    sick,
    num_documents,
    deadly=frozenset(),
    max_attempts=3,
):
    """Do all documents on some GPUs."""
    source = source_of(folder / "input", [num_documents])
    output = resolve(str(folder / "output"))
    draw = random.Random(0)
    keys = [DocumentKey(0, row) for row in range(num_documents)]
    killers = frozenset(keys[row] for row in deadly)
    pool = SimulatedPool(draw, Clock(), 0, frozenset(), GPUS, sick=frozenset(sick), deadly=killers)
    job = JobOptions(workers=GPUS, max_attempts=max_attempts, stall_s=1e6, document_deadline_s=1e6)
    estimates = {key: TokenEstimate(draw.randint(1, 100), 5) for key in keys}
    driver = driver_of(source, output, job, pool, estimates, interrupt)
    driver.drive()
    progress = read_commits(output)
    assert len(progress.done) + len(progress.errors) == num_documents
    attempts = Counter(row["attempts"] for row in rows_of(folder / "output" / "_run" / "parts"))
    assert isinstance(driver.display, Screen)
    return Night({key.row for key in progress.errors}, attempts, pool.deaths, driver.display)


def test_one_broken_gpu_of_eight_makes_no_error_row_and_is_left_out(tmp_path, interrupt):
    """It made 48 of 2,000 healthy documents error rows in an hour: a charged document was tried again where a worker
    was empty, and that was always the broken GPU's next one.
    """
    run = night(tmp_path, interrupt, {5}, 400)
    assert run.failed == set()
    assert run.deaths.keys() == {5}
    assert run.deaths[5] <= MAX_DEATHS + 1, "the last one may have been on its way"
    [left_out] = run.screen.told("place_left_out")
    assert left_out["host"] == "host-1"
    assert left_out["place"] == "GPU 5"
    [note] = [note for note in run.screen.notes if "is left out" in note]
    assert "host-1 (GPU 5, H200) is left out" in note
    assert "workers died there in a row and no document was done: the worker died: gone" in note


@pytest.mark.parametrize("sick, max_attempts", [({0}, 1), ({2, 6}, 3), ({4, 5, 6, 7}, 1)])
def test_healthy_documents_are_done_however_few_attempts_they_have(tmp_path, interrupt, sick, max_attempts):
    """Up to half of the GPUs are broken."""
    run = night(tmp_path, interrupt, sick, 300, max_attempts=max_attempts)
    assert run.failed == set()


def test_documents_that_kill_are_found_beside_a_broken_gpu(tmp_path, interrupt):
    """Each is an error row after three deaths at three places, and its neighbours lose time alone."""
    deadly = frozenset({7, 100, 333})
    run = night(tmp_path, interrupt, {3}, 600, deadly)
    assert run.failed == deadly
    assert run.deaths.total() - run.deaths[3] <= 3 * len(deadly)
    assert len(run.screen.told("place_left_out")) <= 1


def test_many_documents_that_kill_leave_no_healthy_gpu_out(tmp_path, interrupt):
    """One document in ten kills its worker: a bad corpus, not eight broken GPUs."""
    deadly = frozenset(range(0, 400, 10))
    run = night(tmp_path, interrupt, set(), 400, deadly)
    assert run.failed == deadly
    assert run.screen.told("place_left_out") == []


def test_a_run_on_broken_gpus_alone_ends(tmp_path, interrupt):
    """The last place is never left out: the run says what happens, and leaves most of the corpus alone."""
    with pytest.raises(WorkersFailError, match=f"{MAX_FRUITLESS_DEATHS} workers died and no document was done between"):
        night(tmp_path, interrupt, set(range(GPUS)), 300)
