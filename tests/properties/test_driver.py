"""The real driver, scheduler, roster, commits and finalize, over workers and a clock that are made up."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend import config
from specextend.cluster.exits import RunError
from specextend.cluster.records import tried_before
from specextend.config import JobOptions
from specextend.core import DocumentKey
from specextend.data.commits import pending, read_commits
from specextend.data.finalize import finalize
from specextend.data.run_folder import Counts
from specextend.data.storage import resolve
from tests.job.conftest import rows as rows_of
from tests.properties.rows import in_a_folder, name_of, source_of
from tests.properties.simulated import LATE, LEASES, PATIENT, Killed, SimulatedPool, driver_of

MAX_STARTS = 60


@pytest.fixture(autouse=True)
def _no_silence(monkeypatch):
    """Hours of the made-up clock may pass between two signs of life."""
    monkeypatch.setattr(config, "LEAST_SILENCE_S", 1e9)


class Night:
    """A run of as many starts as it takes."""

    def __init__(self, folder, seed, interrupt):
        self.draw = random.Random(seed)
        self.sizes = [self.draw.randint(0, 9) for _ in range(self.draw.randint(1, 4))]
        self.keys = [DocumentKey(file, row) for file, size in enumerate(self.sizes) for row in range(size)]
        self.source = source_of(folder / "input", self.sizes)
        self.output = resolve(f"{folder}/output")
        self.poison = frozenset(key for key in self.keys if self.draw.random() < 0.1)
        self.interrupt = interrupt
        self.trouble = self.draw.choice([0, 10, 40])
        self.workers = self.draw.randint(1, 4)

    def pass_by(self):
        """Start again until a driver comes to its end; how many starts it took."""
        for start in range(1, MAX_STARTS):
            trouble = self.trouble if start < MAX_STARTS // 2 else 0
            num_places = self.workers + self.draw.randint(0, 1)
            pool = SimulatedPool(self.draw, num_places, trouble, self.poison)
            ends = (Killed, RunError) if trouble else Killed
            try:
                self.driver(pool).drive()
            except ends:
                continue
            assert pool.most_leases <= LEASES + 1
            return start
        raise AssertionError("the run does not end")

    def driver(self, pool):
        progress = read_commits(self.output)
        patience = {"document_deadline_s": 300.0, "stall_s": 100.0} if self.trouble else PATIENT
        return driver_of(
            self.source,
            self.output,
            JobOptions(workers=self.workers, **patience),
            pool,
            sorted(pending(map(range, self.sizes), progress)),
            self.interrupt,
            rows_per_commit=self.draw.randint(1, 6),
            run_id=f"{self.draw.getrandbits(32):08x}",
            tried=tried_before(self.output, progress),
        )


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_in_the_night_every_row_is_there_once_in_the_morning(seed, interrupt):
    """Workers die, hang and never start; calls and nodes are lost; drivers are killed, batches fail; files are
    out of reach.
    """

    def check(folder):
        night = Night(folder, seed, interrupt)
        night.pass_by()
        counts = finalize(night.source, night.output)
        summaries = rows_of(folder / "output" / "summaries")
        errors = rows_of(folder / "output" / "errors")
        assert counts == Counts(len(night.keys), len(summaries), len(errors))
        ids = Counter(row["doc_id"] for row in summaries + errors)
        assert ids == Counter(map(name_of, night.keys)), "nothing lost, nothing twice"
        failed = {row["doc_id"] for row in errors}
        assert failed >= set(map(name_of, night.poison))
        assert all(row["summary"] == f"summary of {row['doc_id']}" for row in summaries), "its own"
        assert all(row["summary"] != LATE for row in rows_of(folder / "output" / "_run" / "parts"))
        if not night.trouble:
            assert failed == set(map(name_of, night.poison)), "without trouble nobody else is given up"

    in_a_folder(check)
