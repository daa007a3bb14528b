from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.cluster.leases import LONGEST_PAUSE_S, MAX_LOSSES, GivenUp, Lease, Limits
from specextend.cluster.places import Place, Spot
from specextend.cluster.scheduler import Scheduler
from specextend.core import DocumentKey

LIMITS = Limits(max_attempts=2, deadline_base_s=10, deadline_s_per_token=1, stall_s=30)


def key(row: int) -> DocumentKey:
    return DocumentKey(0, row)


def scheduler(lengths: list[int], leases_per_worker: int = 3, limits: Limits = LIMITS) -> Scheduler:
    return Scheduler([(key(row), length) for row, length in enumerate(lengths)], limits, leases_per_worker)


def at(worker: str) -> Place:
    """A place of its own for a worker."""
    return Place(f"node of {worker}", Spot(f"host of {worker}", "seat 1"))


def granted(grants: list[tuple[str, Lease]], worker: str | None = None) -> list[int]:
    return [lease.key.row for name, lease in grants if worker in (None, name)]


def ids(grants: list[tuple[str, Lease]]) -> dict[int, str]:
    return {lease.key.row: lease.lease_id for _, lease in grants}


def test_the_longest_documents_go_first():
    """A long document begun last would run on while every other worker idles."""
    plan = scheduler([5, 9, 7, 1])
    plan.join("a", at("a"), 0)
    assert granted(plan.assign(0)) == [1, 2, 0]


def test_leases_are_spread_over_the_workers():
    """Few documents on many workers: each gets one before any gets two."""
    plan = scheduler([4, 3, 2, 1])
    plan.join("a", at("a"), 0)
    plan.join("b", at("b"), 0)
    grants = plan.assign(0)
    assert granted(grants, "a") == [0, 2]
    assert granted(grants, "b") == [1, 3]


def test_a_death_charges_what_had_started_and_frees_the_rest():
    """Only a started document can have killed the worker."""
    plan = scheduler([3, 2, 1])
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, [lease[0]], 1)
    assert plan.leave("a", "WorkerDied", "gone") == []
    plan.join("b", at("b"), 2)
    assert [(lease.key.row, lease.attempt) for _, lease in plan.assign(2)] == [(0, 2)]
    plan.join("c", at("c"), 2)
    assert [(lease.key.row, lease.attempt) for _, lease in plan.assign(2)] == [(1, 1), (2, 1)]


def test_a_charged_document_runs_alone_and_is_given_up_after_max_attempts():
    """Whatever kills workers may kill its neighbours' work once, not twice."""
    plan = scheduler([3, 2, 1])
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, [lease[0]], 1)
    plan.leave("a", "WorkerDied", "gone")
    plan.join("b", at("b"), 2)
    assert granted(plan.assign(2)) == [0]
    assert plan.leave("b", "WorkerDied", "gone again") == [GivenUp(key(0), 2, "WorkerDied", "gone again")]
    assert plan.num_open == 2


def test_a_document_that_kills_before_it_is_seen_to_start_is_still_found():
    """The driver polls every two seconds: a faster killer is never reported started, and must not loop for ever."""
    plan = scheduler([3, 2, 1])
    given_up: list[GivenUp] = []
    for death in range(20):
        plan.join(f"w{death}", at(f"w{death}"), death)
        grants = plan.assign(death)
        if 0 in granted(grants):
            given_up += plan.leave(f"w{death}", "WorkerDied", "gone")
        else:
            for _, lease in grants:
                assert plan.finish(lease.lease_id)
            plan.leave(f"w{death}", "WorkerDied", "idle")
    assert [item.key for item in given_up] == [key(0)]
    assert plan.is_done


def test_a_node_death_charges_nobody():
    """A reclaimed spot node says nothing about a document."""
    plan = scheduler([3, 2, 1])
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, list(lease.values()), 1)
    assert plan.lose("a", "node died") == []
    plan.join("b", at("b"), 2)
    assert [(lease.key.row, lease.attempt) for _, lease in plan.assign(2)] == [(0, 1), (1, 1), (2, 1)]


def test_a_document_whose_every_node_dies_is_given_up_in_the_end():
    """A document may take the whole node down (host memory): the job must still end."""
    plan = scheduler([3])
    given_up = []
    for death in range(MAX_LOSSES):
        plan.join(f"w{death}", at(f"w{death}"), death)
        plan.assign(death)
        given_up += plan.lose(f"w{death}", "node died")
    assert [(item.key, item.error_class) for item in given_up] == [(key(0), "NodeLost")]
    assert plan.is_done


def test_a_deadline_counts_from_the_start_of_prefill():
    """Time in the queue is not the document's."""
    plan = scheduler([5, 4])
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, [lease[0]], 100)
    assert plan.overdue(115) == []
    assert [late.key.row for late in plan.overdue(115.1)] == [0]


def test_an_overdue_document_is_charged_and_its_neighbours_go_on():
    """One slow document costs itself an attempt and nobody else anything."""
    plan = scheduler([5, 4])
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, list(lease.values()), 1)
    assert plan.expire(lease[0], "late") == []
    assert not plan.finish(lease[0]), "a result that comes after the lease was taken back is dropped"
    assert plan.finish(lease[1])
    assert granted(plan.assign(50)) == [], "alone means: not beside the call that is still closing"
    plan.closed("a")
    assert granted(plan.assign(50)) == [0]


def test_documents_of_a_failed_batch_are_tried_again_one_by_one():
    """Whose fault it was is known when each has been alone; the worker lives and goes on with the others."""
    plan = scheduler([5, 4, 3])
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    assert plan.blame(lease[0], "ValueError", "why") == []
    assert plan.blame(lease[1], "ValueError", "why") == []
    assert granted(plan.assign(1)) == [], "not beside the third"
    assert plan.finish(lease[2])
    assert granted(plan.assign(2)) == [0]


def test_a_worker_that_makes_no_step_is_stalled():
    """A hung kernel answers polls but never steps."""
    plan = scheduler([5, 4])
    plan.join("a", at("a"), 0)
    plan.assign(0)
    plan.report("a", 7, [], 10)
    plan.report("a", 7, [], 35)
    assert plan.stalled(40) == []
    assert plan.stalled(40.1) == ["a"]
    plan.report("a", 8, [], 41)
    assert plan.stalled(42) == []


def test_an_idle_worker_does_not_stall():
    """Nothing to do is no hang, and a lease after an idle hour starts a new count."""
    plan = scheduler([5])
    plan.join("a", at("a"), 0)
    plan.join("b", at("b"), 0)
    plan.assign(0)
    plan.report("b", 0, [], 0)
    assert plan.stalled(31) == ["a"]
    plan.leave("a", "Stalled", "no step")
    plan.assign(3600)
    assert plan.stalled(3601) == []


def test_a_neighbour_of_a_hang_that_had_not_begun_is_not_charged():
    """The overdue document still hangs in the engine; the one leased after it has done nothing."""
    plan = scheduler([5, 4], leases_per_worker=1)
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, [lease[0]], 1)
    plan.expire(lease[0], "late")
    plan.closed("a")
    assert granted(plan.assign(100)) == [0], "the charged one, alone"
    assert plan.leave("a", "Stalled", "no step") == []
    plan.join("b", at("b"), 200)
    assert [lease.attempt for _, lease in plan.assign(200) if lease.key.row == 0] == [2]


def test_a_lease_is_never_given_twice():
    """A late report or result of an old lease must not touch the new one."""
    plan = scheduler([5])
    plan.join("a", at("a"), 0)
    old = ids(plan.assign(0))[0]
    plan.leave("a", "WorkerDied", "gone")
    plan.join("b", at("b"), 1)
    new = ids(plan.assign(1))[0]
    assert new != old
    assert not plan.finish(old)
    assert plan.finish(new)
    assert plan.is_done


@pytest.mark.parametrize("leases_per_worker", [1, 3])
def test_an_error_row_says_how_often_it_was_tried(leases_per_worker: int):
    """`attempts` of the dead letter is the number of charges."""
    plan = scheduler([5], leases_per_worker, Limits(max_attempts=4))
    given_up = []
    for death in range(9):
        plan.join(f"w{death}", at(f"w{death}"), death)
        for _, lease in plan.assign(death):
            plan.report(f"w{death}", 1, [lease.lease_id], death)
        given_up += plan.leave(f"w{death}", "WorkerDied", "gone")
    assert [item.attempts for item in given_up] == [4]


def fail_to_read(plan: Scheduler, now: float) -> list[int]:
    """Nobody reads anything of what is leased now; the rows."""
    grants = plan.assign(now)
    for _, lease in grants:
        plan.unread(lease.lease_id, now)
    return granted(grants)


def test_a_worker_that_cannot_read_waits_longer_and_longer_and_charges_nobody():
    """A node without the input's mount fails at once, so without that it would be leased every document."""
    plan = scheduler([5] * 20)
    plan.join("blind", at("blind"), 0)
    now = 0.0
    for pause in (10, 20, 40, 80, 160, 320, 600, 600):
        assert fail_to_read(plan, now) == [0, 1, 2]
        assert not plan.sees("blind", 0, now)
        assert plan.assign(now + pause - 1) == []
        now += pause
    assert [lease.attempt for _, lease in plan.assign(now)] == [1, 1, 1]


def two_files(num_documents: int) -> Scheduler:
    """As many documents of a first file as of a second; those of the first are longer."""
    documents = [(DocumentKey(file, row), 50 - 40 * file) for file in range(2) for row in range(num_documents)]
    return Scheduler(documents, LIMITS, leases_per_worker=3)


def test_a_worker_that_cannot_read_one_file_gets_those_of_others():
    """A file whose copy is stale on its node stands in nobody's way, though its documents are the longest."""
    plan = two_files(4)
    plan.join("half", at("half"), 0)
    assert fail_to_read(plan, 0) == [0, 1, 2]
    grants = plan.assign(1)
    assert [lease.key for _, lease in grants] == [DocumentKey(1, row) for row in range(3)]
    for _, lease in grants:
        plan.finish(lease.lease_id)
    assert [lease.key for _, lease in plan.assign(2)] == [DocumentKey(1, 3)]
    assert [lease.key for _, lease in plan.assign(10)] == [DocumentKey(0, 0), DocumentKey(0, 1)]


def test_a_worker_that_reads_nothing_of_two_files_gets_nothing_of_any():
    """A folder of a thousand files would otherwise be tried file by file."""
    plan = Scheduler([(DocumentKey(file, 0), 5) for file in range(9)], LIMITS, leases_per_worker=1)
    plan.join("blind", at("blind"), 0)
    for file in range(2):
        [(_, lease)] = plan.assign(0)
        assert lease.key.file == file
        plan.unread(lease.lease_id, 0)
    assert plan.assign(9) == []
    [(_, lease)] = plan.assign(10)
    plan.finish(lease.lease_id)
    assert plan.assign(10), "what it reads again ends that"


def test_what_was_not_looked_into_is_leased_again_and_charged_to_nobody():
    plan = scheduler([5])
    plan.join("a", at("a"), 0)
    [(_, lease)] = plan.assign(0)
    plan.put_back(lease.lease_id, 1)
    assert [(worker, lease.attempt) for worker, lease in plan.assign(1)] == [("a", 1)]


def test_what_one_worker_cannot_read_another_one_gets_at_once():
    plan = scheduler([5] * 4)
    plan.join("blind", at("blind"), 0)
    assert fail_to_read(plan, 0) == [0, 1, 2]
    plan.join("seeing", at("seeing"), 1)
    grants = plan.assign(1)
    assert [(worker, lease.key.row, lease.attempt) for worker, lease in grants] == [
        ("seeing", row, 1) for row in range(3)
    ]


def test_a_worker_that_has_read_something_waits_briefly_the_next_time():
    """A store that did not answer for a moment, now and then in a night."""
    plan = scheduler([5] * 3, leases_per_worker=1)
    plan.join("a", at("a"), 0)
    assert fail_to_read(plan, 0) == [0]
    assert fail_to_read(plan, 10) == [0]
    [(_, lease)] = plan.assign(30)
    assert plan.finish(lease.lease_id)
    assert fail_to_read(plan, 30) == [1]
    assert granted(plan.assign(40)) == [1]


def test_a_charged_document_is_not_given_to_a_worker_that_waits():
    """It runs alone, on any worker that is empty: one that reads nothing is always empty."""
    plan = scheduler([5, 5], leases_per_worker=1, limits=replace(LIMITS, max_attempts=3))
    plan.join("a", at("a"), 0)
    plan.join("blind", at("blind"), 0)
    lease = dict(plan.assign(0))
    plan.unread(lease["blind"].lease_id, 0)
    assert plan.blame(lease["a"].lease_id, "ValueError", "why") == []
    assert [worker for worker, _ in plan.assign(1)] == ["a"]


def test_a_document_that_nobody_can_read_is_given_up_after_max_attempts_and_pauses():
    plan = scheduler([5])
    plan.join("a", at("a"), 0)
    [(_, lease)] = plan.assign(0)
    assert plan.damaged(lease.lease_id, "OSError", "bad", 0) == []
    assert plan.assign(9) == []
    [(worker, lease)] = plan.assign(10)
    assert (worker, lease.attempt) == ("a", 2)
    assert plan.damaged(lease.lease_id, "OSError", "bad", 10) == [GivenUp(key(0), 2, "OSError", "bad")]
    assert plan.is_done


def test_a_worker_that_answers_that_it_cannot_read_does_not_hang():
    """For as long as a store is away it makes no step."""
    plan = scheduler([5, 5], leases_per_worker=1)
    plan.join("a", at("a"), 0)
    assert fail_to_read(plan, 0) == [0]
    [(_, lease)] = plan.assign(20)
    plan.unread(lease.lease_id, 45)
    assert plan.assign(65)
    assert plan.stalled(75) == []


def two_workers_and_a_queue() -> tuple[Scheduler, dict[int, str]]:
    """Worker a: row 0 in its engine, rows 2 and 4 behind it. Worker b has done rows 1, 3 and 5."""
    plan = scheduler([60, 50, 40, 30, 20, 10])
    plan.join("a", at("a"), 0)
    plan.join("b", at("b"), 0)
    lease = ids(plan.assign(0))
    for row in (1, 3, 5):
        assert plan.finish(lease[row])
    return plan, lease


def test_an_idle_worker_gets_what_waits_behind_a_long_document():
    """The tail: else the last documents wait for the longest one while a worker idles. It costs no attempt."""
    plan, lease = two_workers_and_a_queue()
    plan.report("a", 1, [lease[0]], 1)
    worker, taken = plan.rebalance(20)
    assert (worker, taken.key.row) == ("a", 2), "the longest of those that wait"
    assert [(name, new.key.row, new.attempt) for name, new in plan.assign(2)] == [("b", 2, 1)]
    assert not plan.finish(taken.lease_id), "a result that comes after all is dropped"
    plan.closed("a")
    assert plan.rebalance(20) is None, "one runs and one waits here, one runs there: nothing to gain"


def test_a_lease_is_taken_back_only_if_its_worker_says_that_it_waits():
    """What has begun stays where it is, and what was just handed out may have begun."""
    plan, lease = two_workers_and_a_queue()
    assert plan.rebalance(20) is None
    plan.report("a", 1, [lease[0], lease[2], lease[4]], 1)
    assert plan.rebalance(20) is None


def test_nothing_is_taken_back_while_documents_wait_for_a_worker():
    """A document that has to run alone needs a worker that runs dry: it must not be given neighbours."""
    plan, lease = two_workers_and_a_queue()
    plan.report("a", 1, [lease[0]], 1)
    assert plan.blame(lease[4], "ValueError", "why") == []
    assert plan.rebalance(20) is None
    assert [(name, new.key.row) for name, new in plan.assign(2)] == [("b", 4)]
    assert plan.rebalance(20) is None, "nor while it runs"


def test_a_queue_behind_a_hang_is_emptied():
    """An overdue document may hang in the engine until stall_s has passed; what waits behind it need not."""
    plan = scheduler([5, 4], limits=Limits(max_attempts=1, deadline_base_s=10, deadline_s_per_token=1))
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, [lease[0]], 1)
    plan.expire(lease[0], "late")
    plan.closed("a")
    plan.join("b", at("b"), 20)
    worker, taken = plan.rebalance(20)
    assert (worker, taken.key.row) == ("a", 1)
    assert granted(plan.assign(20), "b") == [1]


EVENTS = ["finish", "finish", "report", "die", "lose", "unread", "put back", "damaged", "wait", "late", "close"]


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
        self.now, self.num_started = 0.0, 0
        for _ in range(num_workers):
            self.start_worker()

    def start_worker(self) -> None:
        self.num_started += 1
        self.workers[f"w{self.num_started}"] = {}
        self.plan.join(f"w{self.num_started}", at(f"w{self.num_started}"), self.now)

    def assign(self) -> None:
        self.grant()
        for _ in range(100):
            if (taken := self.plan.rebalance(self.now)) is None:
                return
            worker, lease = taken
            del self.workers[worker][lease.lease_id]
            self.old.append(lease.lease_id)
            self.closing[worker] += 1
            self.grant()
        raise AssertionError("leases go to and fro")

    def grant(self) -> None:
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
        assert self.plan.finish(lease.lease_id)
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
            self.plan.report(worker, self.num_started, [lease.lease_id], self.now)
        elif event in ("die", "lose"):
            self.bury(worker, charge=event == "die")
        elif event in ("unread", "put back", "damaged"):
            self.cannot_read(worker, lease, event)
        elif event == "wait":
            self.wait()
        elif event == "late" and self.old:
            assert not self.plan.finish(self.data.draw(st.sampled_from(self.old)))
        elif event == "close" and self.closing[worker]:
            self.closing[worker] -= 1
            self.plan.closed(worker)

    def cannot_read(self, worker: str, lease: Lease, event: str) -> None:
        del self.workers[worker][lease.lease_id]
        if event == "unread":
            assert self.plan.unread(lease.lease_id, self.now) > 0
        elif event == "put back":
            self.plan.put_back(lease.lease_id, self.now)
        else:
            self.num_damaged[lease.key] += 1
            self.given_up += self.plan.damaged(lease.lease_id, "OSError", "bad", self.now)

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
            self.now += LONGEST_PAUSE_S
            self.assign()
            held = [(worker, lease) for worker, leases in self.workers.items() for lease in leases.values()]
            if not held:
                return
            self.finish(*held[0])
        raise AssertionError("the job does not end")


@settings(max_examples=150, deadline=None)
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
