"""A scheduler in whatever nights hypothesis draws: deaths, losses, files that cannot be read, late answers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.cluster.messages import GivenUp, Lease
from specextend.cluster.scheduler import PAUSE_S
from specextend.core import DocumentKey
from tests.cluster.schedulers import at, key, scheduler

EVENTS = ["finish", "finish", "report", "die", "lose", "unread", "damaged", "blame", "drain", "wait", "late", "close"]


class Simulation:
    """Drives a scheduler with drawn events and keeps its own books."""

    def __init__(self, data: st.DataObject, num_documents: int, num_workers: int, leases_per_worker: int) -> None:
        lengths = data.draw(st.lists(st.integers(1, 50), min_size=num_documents, max_size=num_documents))
        self.data, self.plan = data, scheduler(lengths, leases_per_worker)
        self.poison = data.draw(st.sets(st.sampled_from(range(num_documents)), max_size=2))
        self.leases_per_worker = leases_per_worker
        self.workers: dict[str, dict[str, Lease]] = {}
        self.closing: Counter[str] = Counter()
        self.done: Counter[DocumentKey] = Counter()
        self.given_up: list[GivenUp] = []
        self.num_damaged: Counter[DocumentKey] = Counter()
        self.old: list[str] = []
        self.now, self.num_started, self.num_steps = 0.0, 0, 0
        for _ in range(num_workers):
            self.start_worker()

    def start_worker(self) -> None:
        self.num_started += 1
        self.workers[f"w{self.num_started}"] = {}
        self.plan.join(f"w{self.num_started}", at(f"w{self.num_started}"), self.now)

    def take_back(self, worker: str, lease: Lease) -> None:
        del self.workers[worker][lease.lease_id]
        self.old.append(lease.lease_id)
        self.closing[worker] += 1

    def assign(self) -> None:
        for worker, lease in self.plan.assign(self.now):
            assert self.done[lease.key] == 0, "a document that is done was leased"
            assert all(lease.key != other.key for held in self.workers.values() for other in held.values())
            self.workers[worker][lease.lease_id] = lease
            if lease.attempt > 1 + self.num_damaged[lease.key]:
                assert len(self.workers[worker]) == 1, "a charged document runs alone"
        assert all(len(held) <= self.leases_per_worker for held in self.workers.values())

    def bury(self, worker: str, charge: bool) -> None:
        self.old += self.workers.pop(worker)
        leave = self.plan.leave(worker, "WorkerDied", "gone") if charge else self.plan.lose(worker, "node died")
        self.given_up += leave
        self.closing.pop(worker, None)
        self.start_worker()

    def finish(self, worker: str, lease: Lease) -> None:
        if lease.key.row in self.poison:
            self.bury(worker, charge=True)
            return
        del self.workers[worker][lease.lease_id]
        self.plan.finish(lease.lease_id)
        self.done[lease.key] += 1

    def step(self) -> None:
        self.assign()
        busy = sorted(worker for worker, held in self.workers.items() if held)
        if not busy:
            return
        worker = self.data.draw(st.sampled_from(busy))
        lease = self.data.draw(st.sampled_from(list(self.workers[worker].values())))
        event = self.data.draw(st.sampled_from(EVENTS))
        if event == "finish":
            self.finish(worker, lease)
        elif event == "report":
            self.report(worker, [lease.lease_id])
        elif event in ("die", "lose"):
            self.bury(worker, charge=event == "die")
        elif event in ("unread", "damaged", "blame"):
            self.fail(worker, lease, event)
        elif event == "drain":
            self.drain_node(worker)
        elif event == "wait":
            self.wait()
        elif event == "late" and self.old:
            assert self.data.draw(st.sampled_from(self.old)) not in self.plan.held
        elif event == "close" and self.closing[worker]:
            self.closing[worker] -= 1
            self.plan.closed(worker)

    def report(self, worker: str, started: list[str]) -> None:
        self.num_steps += 1
        self.plan.report(worker, self.num_steps, started, self.now)

    def fail(self, worker: str, lease: Lease, event: str) -> None:
        del self.workers[worker][lease.lease_id]
        if event == "unread":
            self.plan.unread(lease.lease_id, self.now)
            assert self.plan.is_resting(worker, self.now)
        elif event == "blame":
            self.given_up += self.plan.blame(lease.lease_id, "ValueError", "a batch failed")
        else:
            self.num_damaged[lease.key] += 1
            self.given_up += self.plan.damaged(lease.lease_id, "OSError", "bad")

    def drain_node(self, worker: str) -> None:
        for lease in self.plan.drain(worker):
            self.take_back(worker, lease)
        self.bury(worker, charge=False)

    def wait(self) -> None:
        self.now += self.data.draw(st.floats(0, 40))
        for lease in self.plan.overdue(self.now):
            owner = next(worker for worker, held in self.workers.items() if lease.lease_id in held)
            self.given_up += self.plan.expire(lease.lease_id, "late")
            del self.workers[owner][lease.lease_id]
            self.old.append(lease.lease_id)
            self.closing[owner] += 1
        for worker in self.plan.stalled(self.now):
            self.bury(worker, charge=True)

    def drain(self) -> None:
        """From now on only poison kills: the job must come to its end."""
        for _ in range(1000):
            for worker, count in self.closing.items():
                for _ in range(count):
                    self.plan.closed(worker)
            self.closing.clear()
            self.now += PAUSE_S
            for worker in self.workers:
                self.report(worker, [])
            self.assign()
            held = [(worker, lease) for worker, leases in self.workers.items() for lease in leases.values()]
            if not held:
                return
            self.finish(*held[0])
        raise AssertionError("the job does not end")


@settings(max_examples=150)
@given(st.data(), st.integers(1, 8), st.integers(1, 3), st.integers(1, 4))
def test_whatever_dies_whenever_every_document_ends_exactly_once(
    data: st.DataObject, num_documents: int, num_workers: int, leases_per_worker: int
):
    """Nothing lost, nothing twice: done or given up, never both, never neither."""
    simulation = Simulation(data, num_documents, num_workers, leases_per_worker)
    for _ in range(data.draw(st.integers(0, 25))):
        simulation.step()
    simulation.drain()
    given_up = Counter(item.key for item in simulation.given_up)
    assert simulation.plan.is_done
    assert simulation.done + given_up == Counter(key(row) for row in range(num_documents))
    assert all(item.key.row in simulation.poison or item.attempts for item in simulation.given_up)
    assert not {done.row for done in simulation.done} & simulation.poison
