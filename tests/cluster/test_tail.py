"""The end of a run, and nodes that are about to go: who is let go, and who gets what is left."""

from specextend.cluster.messages import Place
from specextend.cluster.scheduler import IDLE_S, Scheduler
from specextend.config import JobOptions
from tests.cluster.lengths import rows_of_length


def plan_of(lengths, workers, leases_per_worker=2):
    """A scheduler with a worker for each letter, each on a node of its own."""
    plan = Scheduler(rows_of_length(lengths), JobOptions(), leases_per_worker)
    for name in workers:
        plan.join(name, Place(f"host {name}", "GPU 0"), 0)
    return plan


def started(plan, grants, now):
    for worker in {worker for worker, _ in grants}:
        plan.report(worker, 1, [lease.lease_id for name, lease in grants if name == worker], now)


def test_idle_workers_are_let_go_while_the_last_documents_run():
    """They held their GPUs until the longest document of the night was done."""
    plan = plan_of([9, 8], "abcd")
    grants = plan.assign(0)
    started(plan, grants, 0)
    assert plan.num_wanted == 2
    assert plan.spare(0) == []
    assert plan.spare(IDLE_S - 1) == [], "a worker that dies may need one at once"
    assert plan.spare(IDLE_S) == ["c", "d"]
    for worker in ("c", "d"):
        plan.release(worker)
    assert plan.spare(9 * IDLE_S) == []
    assert plan.leave("a", "WorkerDied", "gone") == []
    assert plan.num_wanted == 2, "one for the document that is tried again, elsewhere"
