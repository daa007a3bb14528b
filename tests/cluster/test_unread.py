"""Documents that a worker, or nobody, can read: who gets them next, and what is charged."""

from __future__ import annotations

from dataclasses import replace

from specextend.cluster.leases import GivenUp
from specextend.cluster.scheduler import Scheduler
from specextend.core import DocumentKey
from tests.cluster.lengths import of_length
from tests.cluster.schedulers import LIMITS, at, granted, key, scheduler


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
    documents = {DocumentKey(file, row): 50 - 40 * file for file in range(2) for row in range(num_documents)}
    return Scheduler(of_length(documents), LIMITS, leases_per_worker=3)


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
    plan = Scheduler(of_length({DocumentKey(file, 0): 5 for file in range(9)}), LIMITS, leases_per_worker=1)
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
