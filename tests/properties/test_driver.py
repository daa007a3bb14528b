"""The real driver, scheduler, roster, commits and finalize, over workers and a clock that are made up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.cluster.attempts import Attempt
from specextend.cluster.driver import Committer, Driver
from specextend.cluster.interrupt import Interrupt
from specextend.cluster.leases import Limits
from specextend.cluster.lock import OutputLock
from specextend.cluster.metrics import Metrics
from specextend.cluster.progress import Ledger, TokenEstimate
from specextend.cluster.roster import Roster
from specextend.cluster.scheduler import Scheduler
from specextend.config import JobOptions, RunConfig
from specextend.core import DocumentKey
from specextend.data.documents import Source
from specextend.data.finalize import Counts, finalize
from specextend.data.parts import PartWriter, pending, read_parts
from specextend.data.storage import resolve
from tests.cluster.conftest import Screen
from tests.properties.rows import in_a_folder, name_of, rows_of, source_of
from tests.properties.simulated import LATE, Clock, Killed, SimulatedPool

LEASES = 4
MAX_STARTS = 60


@pytest.fixture(scope="module")
def interrupt() -> Iterator[Interrupt]:
    """Never told to stop."""
    interrupt = Interrupt(60.0)
    yield interrupt
    interrupt.disarm()


class Night:
    """A run of as many starts as it takes."""

    def __init__(self, folder: Path, seed: int, interrupt: Interrupt) -> None:
        self.draw = random.Random(seed)
        self.sizes = [self.draw.randint(0, 9) for _ in range(self.draw.randint(1, 4))]
        self.source: Source = source_of(folder / "input", self.sizes)
        self.output = resolve(str(folder / "output"))
        self.keys = [DocumentKey(file, row) for file, size in enumerate(self.sizes) for row in range(size)]
        self.poison = frozenset(key for key in self.keys if self.draw.random() < 0.1)
        self.interrupt = interrupt
        self.trouble = self.draw.choice([0, 10, 40])

    def pass_by(self) -> int:
        """Start again until a driver comes to its end; how many starts it took."""
        for start in range(1, MAX_STARTS):
            keys = list(pending(self.sizes, read_parts(self.output)))
            pool = SimulatedPool(self.draw, Clock(), self.trouble if start < MAX_STARTS // 2 else 0, self.poison)
            try:
                self.driver(keys, pool).run()
            except Killed:
                continue
            assert pool.most_leases <= LEASES + 1
            return start
        raise AssertionError("the run does not end")

    def driver(self, keys: list[DocumentKey], pool: SimulatedPool) -> Driver:
        run_id = f"{self.draw.getrandbits(32):08x}"
        job = JobOptions(workers=self.draw.randint(1, 4), deadline_base_s=60.0, silence_s=1e9)
        config = RunConfig.from_values(
            {"input": {"path": "in"}, "output": {"path": "out"}, "target": {"model": "m"}, "draft": {"kind": "ngram"}}
        )
        limits = Limits(max_attempts=job.max_attempts, deadline_base_s=60.0, stall_s=job.stall_s)
        estimates = {key: TokenEstimate(self.draw.randint(1, 100), 5) for key in keys}
        lock = OutputLock(self.output, run_id, clock=lambda: 0.0)
        return Driver(
            scheduler=Scheduler([(key, each.total) for key, each in estimates.items()], limits, LEASES, f"{run_id}-"),
            pool=pool,
            roster=Roster(job.workers),
            committer=Committer(self.output, PartWriter(self.output, run_id), lock, self.draw.randint(1, 6), 30.0),
            ledger=Ledger(estimates, 0, 0),
            display=Screen(),
            metrics=Metrics(run_id),
            interrupt=self.interrupt,
            attempt=Attempt(self.output, run_id, config),
            source=self.source,
            job=job,
            clock=pool.clock,
        )


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_in_the_night_every_row_is_there_once_in_the_morning(seed: int, interrupt: Interrupt) -> None:
    """Workers die, hang and never start; calls and nodes are lost; drivers are killed, batches fail; files are
    out of reach.
    """

    def check(folder: Path) -> None:
        night = Night(folder, seed, interrupt)
        night.pass_by()
        counts = finalize(night.source, night.output)
        summaries, errors = rows_of(folder / "output" / "summaries"), rows_of(folder / "output" / "errors")
        assert counts == Counts(len(night.keys), len(summaries), len(errors))
        ids = Counter(row["doc_id"] for row in summaries + errors)
        assert ids == Counter(map(name_of, night.keys)), "nothing lost, nothing twice"
        failed = {row["doc_id"] for row in errors}
        assert failed >= set(map(name_of, night.poison))
        assert all(row["summary"] != LATE for row in rows_of(folder / "output" / "_run" / "parts"))
        if not night.trouble:
            assert failed == set(map(name_of, night.poison)), "without trouble nobody else is given up"

    in_a_folder(check)
