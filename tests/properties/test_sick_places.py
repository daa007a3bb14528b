"""Nights on GPUs some of which are broken, with the real driver over workers that are made up."""

import random

import pytest

from specextend.cluster.exits import RunError
from specextend.cluster.scheduler import MAX_DEATHS
from specextend.cluster.workers import MAX_FRUITLESS_DEATHS
from specextend.config import JobOptions
from specextend.core import DocumentKey
from specextend.data.commits import read_commits
from specextend.data.storage import resolve
from tests.properties.rows import source_of
from tests.properties.simulated import PATIENT, SimulatedPool, driver_of

GPUS = 8


def night(folder, interrupt, sick, num_documents, deadly=frozenset(), max_attempts=3):
    """Do all documents on some GPUs; returns the rows that are error rows, the deaths, and what was told."""
    output = resolve(f"{folder}/output")
    keys = [DocumentKey(0, row) for row in range(num_documents)]
    killers = frozenset(keys[row] for row in deadly)
    pool = SimulatedPool(random.Random(0), GPUS, sick=frozenset(sick), deadly=killers)
    job = JobOptions(workers=GPUS, max_attempts=max_attempts, **PATIENT)
    driver = driver_of(source_of(folder / "input", [num_documents]), output, job, pool, keys, interrupt)
    driver.drive()
    progress = read_commits(output)
    assert len(progress.done) + len(progress.errors) == num_documents
    return {key.row for key in progress.errors}, pool.deaths, driver.display


def test_one_broken_gpu_of_eight_makes_no_error_row_and_is_left_out(tmp_path, interrupt):
    """It made 48 of 2,000 healthy documents error rows in an hour: a charged document was tried again where a worker
    was empty, and that was always the broken GPU's next one.
    """
    failed, deaths, screen = night(tmp_path, interrupt, {5}, 400)
    assert failed == set()
    assert {place for _, place in deaths} == {5}
    assert len(deaths) <= MAX_DEATHS + 1, "the last one may have been on its way"
    [left_out] = screen.told("place_left_out")
    assert (left_out["host"], left_out["place"]) == ("host-1", "GPU 5")
    [note] = [note for note in screen.notes if "is left out" in note]
    assert "host-1 (GPU 5, H200) is left out" in note
    assert "workers died there in a row without a finished document: the worker died: gone" in note


def test_documents_that_kill_are_found_beside_a_broken_gpu(tmp_path, interrupt):
    """Each is an error row after three deaths at three places, the second of them another machine, and its neighbours
    lose time alone.
    """
    deadly = frozenset({7, 100, 333})
    failed, deaths, screen = night(tmp_path, interrupt, {3}, 600, deadly)
    assert failed == deadly
    assert len(screen.told("place_left_out")) <= 1
    for row in deadly:
        places = [place for key, place in deaths if key.row == row]
        assert len({*places}) == len(places) == 3
        assert places[0] // 4 != places[1] // 4


def test_a_run_on_broken_gpus_alone_ends(tmp_path, interrupt):
    """The last place is never left out: the run says what happens, and leaves most of the corpus alone."""
    with pytest.raises(RunError, match=f"{MAX_FRUITLESS_DEATHS} workers died in a row without a finished document"):
        night(tmp_path, interrupt, set(range(GPUS)), 300)
