"""The scheduler's decisions, without Ray: who gets what, and who is charged."""

from __future__ import annotations

import pytest

from specextend.cluster.leases import MAX_LOSSES, GivenUp, Limits
from specextend.cluster.scheduler import Scheduler
from tests.cluster.schedulers import at, granted, ids, key, scheduler


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
    [(worker, taken)] = plan.rebalance(20)
    assert (worker, taken.key.row) == ("a", 2), "the longest of those that wait"
    assert [(name, new.key.row, new.attempt) for name, new in plan.assign(2)] == [("b", 2, 1)]
    assert not plan.finish(taken.lease_id), "a result that comes after all is dropped"
    plan.closed("a")
    assert plan.rebalance(20) == [], "one runs and one waits here, one runs there: nothing to gain"


def test_a_lease_is_taken_back_only_if_its_worker_says_that_it_waits():
    """What has begun stays where it is, and what was just handed out may have begun."""
    plan, lease = two_workers_and_a_queue()
    assert plan.rebalance(20) == []
    plan.report("a", 1, [lease[0], lease[2], lease[4]], 1)
    assert plan.rebalance(20) == []


def test_nothing_is_taken_back_while_documents_wait_for_a_worker():
    """A document that has to run alone needs a worker that runs dry: it must not be given neighbours."""
    plan, lease = two_workers_and_a_queue()
    plan.report("a", 1, [lease[0]], 1)
    assert plan.blame(lease[4], "ValueError", "why") == []
    assert plan.rebalance(20) == []
    assert [(name, new.key.row) for name, new in plan.assign(2)] == [("b", 4)]
    assert plan.rebalance(20) == [], "nor while it runs"


def test_a_queue_behind_a_hang_is_emptied():
    """An overdue document may hang in the engine until stall_s has passed; what waits behind it need not."""
    plan = scheduler([5, 4], limits=Limits(max_attempts=1, deadline_base_s=10, deadline_s_per_token=1))
    plan.join("a", at("a"), 0)
    lease = ids(plan.assign(0))
    plan.report("a", 1, [lease[0]], 1)
    plan.expire(lease[0], "late")
    plan.closed("a")
    plan.join("b", at("b"), 20)
    [(worker, taken)] = plan.rebalance(20)
    assert (worker, taken.key.row) == ("a", 1)
    assert granted(plan.assign(20), "b") == [1]
