"""The scheduler's decisions, without Ray: who gets what, who is charged, and who is let go."""

from specextend.cluster.messages import Place
from specextend.cluster.progress import MAX_GAP_S, AwakeClock
from specextend.cluster.scheduler import ALONE_SHARE, IDLE_S, MAX_LOSSES, Scheduler
from specextend.config import JobOptions
from specextend.core import DocumentKey
from tests.cluster.lengths import rows_of_length

JOB = JobOptions(max_attempts=2, document_deadline_s=10, stall_s=30)


def key(row):
    return DocumentKey(0, row)


def scheduler(lengths, workers=(), leases_per_worker=3, job=JOB, **options):
    """A scheduler, and workers, each on a node of its own."""
    plan = Scheduler(rows_of_length(lengths), job, leases_per_worker, **options)
    for worker in workers:
        plan.join(worker, Place(f"host of {worker}", "seat 1"), 0)
    return plan


def granted(grants, worker=None):
    return [lease.key.row for name, lease in grants if worker in (None, name)]


def ids(grants):
    return {lease.key.row: lease.lease_id for _, lease in grants}


def test_a_document_whose_every_node_dies_is_given_up_in_the_end():
    """A document may take the whole node down (host memory): the job must still end."""
    plan = scheduler([3])
    for death in range(MAX_LOSSES):
        plan.join("a", Place(f"host {death}", "seat 1"), death)
        plan.assign(death)
        plan.lose("a", "node died")
    assert [(item.key, item.error.error_class) for item in plan.given_up] == [(key(0), "NodeLost")]
    assert plan.is_done


def test_a_deadline_counts_from_the_start_of_prefill():
    """Time in the queue is not the document's."""
    plan = scheduler([5, 4], "a")
    lease = ids(plan.assign(0))
    plan.report("a", 1, {lease[0]: 1}, 100)
    assert plan.overdue(110) == []
    assert [late.lease.key.row for late in plan.overdue(110.1)] == [0]


def test_near_the_end_nothing_waits_behind_a_full_batch():
    """The last documents would wait for the longest one while another worker idles."""
    plan = scheduler([9] * 9, "ab", num_extra=2)
    first = plan.assign(0)
    assert len(granted(first, "a")) == 3
    assert len(granted(first, "b")) == 3
    for lease in ids(first).values():
        plan.finish(lease)
    assert len(plan.assign(1)) == 2


def test_few_workers_are_kept_for_documents_that_run_alone():
    """A hundred charged documents must not stop the others: one worker in four."""
    plan = scheduler([100 - row for row in range(60)], "abcdefgh", leases_per_worker=2)
    for number, worker in enumerate("abc"):
        plan.assign(number)
        plan.report(worker, 1, dict.fromkeys(plan.held, 1), number)
        plan.leave(worker, "WorkerDied", "gone")
    for lease_id in list(plan.held):
        plan.finish(lease_id)
    grants = plan.assign(9)
    assert sum(lease.is_alone for _, lease in grants) == max(1, 5 // ALONE_SHARE)
    assert len(grants) == 1 + 4 * 2


def test_idle_workers_are_let_go_while_the_last_documents_run():
    """They held their GPUs until the longest document of the night was done."""
    plan = scheduler([9, 8], "abcd")
    for worker, lease in plan.assign(0):
        plan.report(worker, 1, {lease.lease_id: 1}, 0)
    assert plan.num_wanted == 2
    assert plan.spare(0) == []
    assert plan.spare(IDLE_S - 1) == [], "a worker that dies may need one at once"
    assert plan.spare(IDLE_S) == ["c", "d"]
    for worker in "cd":
        plan.release(worker)
    assert plan.spare(9 * IDLE_S) == []
    plan.leave("a", "WorkerDied", "gone")
    assert plan.given_up == []
    assert plan.num_wanted == 2, "one for the document that is tried again, elsewhere"


def test_a_suspended_driver_holds_nobody_for_silent():
    """A virtual machine that was moved: every worker looked as if it had hung for an hour, and was killed."""
    seconds = [1000.0]
    clock = AwakeClock(lambda: seconds[0])
    plan = scheduler([5], "a")
    plan.report("a", 1, {ids(plan.assign(clock()))[0]: 1}, clock())
    seconds[0] += 3600.0
    assert plan.stalled(clock()) == plan.overdue(clock()) == []
    for _ in range(3):
        seconds[0] += MAX_GAP_S
        clock()
    assert plan.stalled(clock()) == ["a"], "and yet it is looked after"
