"""Nights on GPUs one of which is broken, with the real driver on a clock that is made up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specextend.cluster.estimates import TokenEstimate
from specextend.cluster.exits import Interrupt, WorkersFailError
from specextend.cluster.scheduler import MAX_DEATHS
from specextend.cluster.workers import MAX_FRUITLESS_DEATHS
from specextend.config import JobOptions
from specextend.core import DocumentKey
from specextend.data.commits import read_commits
from specextend.data.storage import resolve
from tests.cluster.conftest import Screen
from tests.properties.rows import rows_of, source_of
from tests.properties.simulated import Clock, driver_of
from tests.properties.timed import BATCH, LONGEST_S, SHORTEST_S, Gpu, TimedPool


@pytest.fixture(scope="module")
def interrupt() -> Iterator[Interrupt]:
    """Never told to stop."""
    interrupt = Interrupt(600.0)
    yield interrupt
    interrupt.disarm()


@dataclass
class Night:
    """What a run came to."""

    failed: set[int]
    """Rows that are error rows."""
    attempts: Counter[int]
    """Rows by attempts."""
    deaths: Counter[str]
    """Workers that died, by host and GPU."""
    seconds: float
    screen: Screen


def night(
    folder: Path,
    interrupt: Interrupt,
    gpus: list[Gpu],
    num_documents: int,
    poison: frozenset[int] = frozenset(),
    max_attempts: int = 3,
) -> Night:
    """Do all documents on some GPUs."""
    source, output = source_of(folder / "input", [num_documents]), resolve(str(folder / "output"))
    draw = random.Random(0)
    estimates = {DocumentKey(0, row): TokenEstimate(draw.randint(1, 100), 5) for row in range(num_documents)}
    pool = TimedPool(draw, Clock(), gpus, frozenset(DocumentKey(0, row) for row in poison))
    job = JobOptions(workers=len(gpus), max_attempts=max_attempts)
    driver = driver_of(source, output, job, pool, estimates, interrupt)
    driver.run()
    progress = read_commits(output)
    assert len(progress.done) + len(progress.errors) == num_documents
    attempts = Counter(row["attempts"] for row in rows_of(folder / "output" / "_run" / "parts"))
    assert isinstance(driver.display, Screen)
    return Night({key.row for key in progress.errors}, attempts, Counter(pool.deaths), pool.clock.now, driver.display)


def eight(*sick: int) -> list[Gpu]:
    """Two nodes of four GPUs."""
    return [Gpu(f"n{number // 4}", number % 4, number in sick) for number in range(8)]


def test_one_broken_gpu_of_eight_makes_no_error_row_and_costs_its_share_of_the_time(tmp_path: Path, interrupt) -> None:
    """It made 48 of 2,000 healthy documents error rows in an hour: a charged document was tried again where a worker
    was empty, and that was always the broken GPU's next one.
    """
    documents = 2400
    run = night(tmp_path, interrupt, eight(5), documents)
    assert run.seconds > 1.2 * 3600
    assert run.failed == set()
    assert run.deaths == {"n1/1": MAX_DEATHS}
    assert run.attempts[1] >= documents - BATCH - MAX_DEATHS, "after the first death it has one document at a time"
    [left_out] = run.screen.told("place_left_out")
    assert (left_out["host"], left_out["place"]) == ("host-n1", "GPU 1")
    [note] = [note for note in run.screen.notes if "is left out" in note]
    assert "host-n1 (GPU 1, H200) is left out" in note
    assert "6 workers died there in a row and no document was done: the worker died: its process ended" in note
    on_seven = documents * (SHORTEST_S + LONGEST_S) / 2 / (7 * BATCH)
    assert run.seconds < 1.15 * on_seven


@pytest.mark.parametrize(("sick", "max_attempts"), [((0,), 1), ((2, 6), 2), ((4, 5, 6, 7), 1)])
def test_healthy_documents_are_done_however_few_attempts_they_have(
    tmp_path: Path, interrupt, sick: tuple[int, ...], max_attempts: int
) -> None:
    """Up to a node all of whose GPUs are broken."""
    run = night(tmp_path, interrupt, eight(*sick), 300, max_attempts=max_attempts)
    assert run.failed == set()
    assert {gpu for gpu, num in run.deaths.items() if num > MAX_DEATHS} == set()


def test_poison_documents_are_found_beside_a_broken_gpu(tmp_path: Path, interrupt) -> None:
    """Each is an error row after three deaths at three places, and its neighbours lose time alone."""
    poison = frozenset({7, 100, 333})
    run = night(tmp_path, interrupt, eight(3), 600, poison)
    assert run.failed == poison
    elsewhere = run.deaths.total() - run.deaths["n0/3"]
    assert elsewhere <= 3 * len(poison)
    assert len(run.screen.told("place_left_out")) <= 1


def test_many_poison_documents_leave_no_healthy_gpu_out(tmp_path: Path, interrupt) -> None:
    """One document in ten kills its worker: a bad corpus, not eight broken GPUs."""
    poison = frozenset(range(0, 400, 10))
    run = night(tmp_path, interrupt, eight(), 400, poison)
    assert run.failed == poison
    assert run.screen.told("place_left_out") == []


def test_a_run_on_broken_gpus_alone_ends(tmp_path: Path, interrupt) -> None:
    """The last place is never left out: the run says what happens, and leaves most of the corpus alone."""
    gpus = [Gpu("n", number, is_sick=True) for number in range(2)]
    with pytest.raises(WorkersFailError, match=f"{MAX_FRUITLESS_DEATHS} workers died and no document was done between"):
        night(tmp_path, interrupt, gpus, 300)
