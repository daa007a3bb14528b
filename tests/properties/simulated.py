"""Workers that live in a list: they start, decode, fail and die as chance will have it, on a clock of their own."""

from dataclasses import dataclass, field
from random import Random

from specextend.cluster.backlog import TokenEstimate
from specextend.cluster.driver import Driver
from specextend.cluster.lock import OutputLock
from specextend.cluster.messages import (
    Died,
    Done,
    Draining,
    Lease,
    Lost,
    Polled,
    Ready,
    Returned,
    StartFailed,
    SuspectedError,
    WorkerInfo,
    WorkerReport,
)
from specextend.cluster.progress import AwakeClock, Ledger
from specextend.cluster.records import Committer, StartRecord
from specextend.cluster.scheduler import Scheduler
from specextend.cluster.workers import Roster
from specextend.config import RunConfig
from specextend.data.commits import CommitWriter
from specextend.data.inputs import DocumentError
from specextend.stats import DecodingStats
from tests.cluster.conftest import Screen
from tests.cluster.lengths import estimates_of
from tests.contract.test_configuration import LEAST
from tests.properties.rows import done, name_of

LEASES = 4
"""Of each worker."""
PATIENT = {"document_deadline_s": 1e6, "stall_s": 1e6}
"""Options of a job in which nothing takes too long."""
LATE = "a result whose lease was taken back"


class Killed(BaseException):
    """The driver's process ended here: nothing catches it."""


@dataclass
class Being:
    """A worker."""

    place: int
    is_up: bool = False
    is_hung: bool = False
    num_steps: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)


@dataclass
class SimulatedPool:
    """Stands where the pool of Ray actors stands; one thing happens at each `wait`.

    draw: of what happens. num_places: for workers, each of which gets one that is free. trouble: things that may go
    wrong before nothing goes wrong any more. poison: documents that fail wherever they run. sick: places
    where a worker dies over each document. deadly: documents that kill their worker.
    """

    draw: Random
    num_places: int
    trouble: int = 0
    poison: frozenset = frozenset()
    sick: frozenset = frozenset()
    deadly: frozenset = frozenset()
    deaths: list = field(default_factory=list)
    """Documents and places of workers that died of one of them."""
    workers: dict = field(default_factory=dict)
    most_leases: int = 0
    now: float = 0.0
    """Seconds that have passed."""

    def clock(self):
        return self.now

    def earlier(self, key):
        """No document has answers of an earlier start."""

    def start(self, worker):
        taken = {being.place for being in self.workers.values()}
        self.workers[worker] = Being(self.draw.choice([at for at in range(self.num_places) if at not in taken]))

    def run(self, worker, lease):
        being = self.workers[worker]
        assert being.is_up
        held = [other.key for each in self.workers.values() for other in live(each).values()]
        assert lease.key not in held, "a document is at one worker at most"
        assert not (lease.is_alone and being.leases), "a charged document runs alone"
        being.leases[lease.lease_id] = lease
        self.most_leases = max(self.most_leases, len(being.leases))

    def cancel(self, lease_id):
        for being in self.workers.values():
            if lease_id in being.leases:
                being.cancelled.add(lease_id)

    def kill(self, worker):
        del self.workers[worker]

    def close(self):
        self.workers.clear()

    def wait(self, timeout_s):
        """One thing that happens. Raises Killed."""
        self.now += self.draw.uniform(0.0, 3.0)
        if not self.workers:
            return []
        worker = self.draw.choice(sorted(self._ailing() or self.workers))
        being = self.workers[worker]
        if self.trouble > 0 and self.draw.random() < 0.4:
            self.trouble -= 1
            return self._go_wrong(worker, being)
        return self._go_well(worker, being)

    def _ailing(self):
        """Workers that are about to die of their place: this is faster than any document."""
        return [name for name, being in self.workers.items() if being.place in self.sick and being.leases]

    def _go_well(self, worker, being):
        if not being.is_up:
            being.is_up = True
            return [Ready(worker, WorkerInfo("node", f"host-{being.place // 4}", 1, "H200", (f"GPU {being.place}",)))]
        if being.is_hung:
            return [Polled(worker, WorkerReport(being.num_steps, {}))]
        being.num_steps += 1
        if not being.leases or (being.place not in self.sick and self.draw.random() < 0.3):
            begun = self.draw.sample(sorted(being.leases), self.draw.randint(0, len(being.leases)))
            return [Polled(worker, WorkerReport(being.num_steps, dict.fromkeys(begun, 1)))]
        lease = being.leases[self.draw.choice(sorted(being.leases))]
        if being.place in self.sick or lease.key in self.deadly:
            self.deaths.append((lease.key, being.place))
            begun = Polled(worker, WorkerReport(being.num_steps, {lease.lease_id: 1}))
            return [begun, *self._die(worker, being)]
        return [self._end(worker, being, lease)]

    def _end(self, worker, being, lease):
        """A call returns."""
        del being.leases[lease.lease_id]
        if lease.lease_id in being.cancelled and self.draw.random() < 0.7:
            return Returned(worker, lease, Lost("cancelled"))
        if lease.key in self.poison:
            return Returned(worker, lease, DocumentError("ValueError", "poison", "decode"))
        text = LATE if lease.lease_id in being.cancelled else f"summary of {name_of(lease.key)}"
        stats = DecodingStats(num_prompt_tokens=1, num_output_tokens=2)
        return Returned(worker, lease, Done(done(lease.key, text), stats, 1.0))

    def _go_wrong(self, worker, being):
        choices = [self._kill_driver]
        if not being.is_up:
            choices += [self._fail_to_start]
        else:
            choices += [self._die] * 3 + [self._hang]
            if live(being):
                choices += [self._fail_batch, self._lose_call, self._cannot_read, self._drain]
        return self.draw.choice(choices)(worker, being)

    def _kill_driver(self, worker, being):
        raise Killed

    def _fail_to_start(self, worker, being):
        del self.workers[worker]
        return [StartFailed(worker, "no weights")]

    def _die(self, worker, being):
        del self.workers[worker]
        with_node = not (self.sick or self.deadly) and self.draw.random() < 0.3
        return [Died(worker, "gone", with_node=with_node)]

    def _hang(self, worker, being):
        being.is_hung = True
        return self._go_well(worker, being)

    def _drain(self, worker, being):
        return [Draining(worker)]

    def _fail_batch(self, worker, being):
        batch = live(being)
        for lease_id in batch:
            del being.leases[lease_id]
        return [Returned(worker, lease, SuspectedError("ValueError", "a batch", "decode")) for lease in batch.values()]

    def _cannot_read(self, worker, being):
        """What it was just given; the file is there for others."""
        why = DocumentError("OSError", "no such mount", "read", retryable=True)
        return [Returned(worker, self._any_lease(being), why)]

    def _lose_call(self, worker, being):
        return [Returned(worker, self._any_lease(being), Lost("lost on the way"))]

    def _any_lease(self, being):
        return being.leases.pop(self.draw.choice(sorted(live(being))))


def driver_of(source, output, job, pool, keys, interrupt, *, run_id="0a0a0a0a", rows_per_commit=64, tried=None):
    """The real driver of one start around a pool that is made up, on the pool's clock."""
    lock = OutputLock(output, run_id, clock=lambda: 0.0, monotonic=lambda: 0.0)
    planned = estimates_of({key: TokenEstimate(pool.draw.randint(1, 100), 5) for key in keys})
    record = StartRecord(output, run_id, RunConfig.from_values(LEAST))
    return Driver(
        scheduler=Scheduler(planned, job, LEASES, f"{run_id}-", tried),
        pool=pool,
        roster=Roster(job.workers),
        committer=Committer(output, CommitWriter(output, run_id), record, lock, rows_per_commit, 30.0),
        ledger=Ledger(planned, 0, 0),
        display=Screen(),
        interrupt=interrupt,
        record=record,
        source=source,
        job=job,
        clock=AwakeClock(pool.clock),
    )


def live(being):
    """Leases in force."""
    return {name: lease for name, lease in being.leases.items() if name not in being.cancelled}
