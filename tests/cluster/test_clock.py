from __future__ import annotations

from specextend.cluster.clock import MAX_GAP_S, AwakeClock
from specextend.cluster.leases import Limits
from specextend.cluster.places import Place, Spot
from specextend.cluster.scheduler import Scheduler
from specextend.core import DocumentKey


class Jumps:
    """A clock that somebody sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_time_passes_as_it_does_for_whoever_looks():
    source = Jumps()
    clock = AwakeClock(source)
    for _ in range(100):
        source.now += MAX_GAP_S / 2
        clock()
    assert clock() == 50 * MAX_GAP_S


def test_a_gap_counts_briefly_and_a_step_back_for_nothing():
    source = Jumps()
    clock = AwakeClock(source)
    source.now += 1e6
    assert clock() == MAX_GAP_S
    source.now -= 2e6
    assert clock() == MAX_GAP_S
    source.now += 1.0
    assert clock() == MAX_GAP_S + 1.0


def test_a_suspended_driver_holds_nobody_for_silent():
    """A virtual machine that was moved: every worker looked as if it had hung for an hour, and was killed."""
    source = Jumps()
    clock = AwakeClock(source)
    plan = Scheduler([(DocumentKey(0, 0), 5)], Limits(stall_s=60.0, deadline_base_s=60.0), leases_per_worker=1)
    plan.join("a", Place("node", Spot("host", "GPU 0")), clock())
    [(_, lease)] = plan.assign(clock())
    plan.report("a", 1, [lease.lease_id], clock())
    source.now += 3600.0
    assert plan.stalled(clock()) == []
    assert plan.overdue(clock()) == []
    for _ in range(20):
        source.now += MAX_GAP_S
        clock()
    assert plan.stalled(clock()) == ["a"], "and yet it is looked after"
