import pytest

from specextend.cluster.backlog import TokenEstimate
from specextend.cluster.messages import Place
from specextend.cluster.progress import (
    MAX_GAP_S,
    AwakeClock,
    Ledger,
)
from specextend.cluster.scheduler import Scheduler
from specextend.config import JobOptions
from specextend.core import DocumentKey
from specextend.stats import DecodingStats
from tests.cluster.lengths import estimates_of, rows_of_length


def key(row):
    return DocumentKey(0, row)


def ledger(*estimates, num_done=0, work=None):
    documents = {key(row): TokenEstimate(*pair) for row, pair in enumerate(estimates)}
    return Ledger(estimates_of(documents), num_done, 0, work)


def stats(prompt, output, prefill_s=1.0, verify_s=1.0):
    return DecodingStats(num_prompt_tokens=prompt, num_output_tokens=output, prefill_s=prefill_s, verify_s=verify_s)


def test_the_time_left_is_by_work_not_by_rows():
    """Longest first: after the long half of the rows, far less than half of the time is left."""
    book = ledger((9000, 100), (1000, 100))
    book.snapshot(0.0, 1)
    book.finish(key(0), stats(9000, 100, prefill_s=9.0, verify_s=1.0))
    assert book.output_cost == pytest.approx(10.0)
    now = book.snapshot(10.0, 1)
    assert now.eta_s == pytest.approx(10.0 * 2000 / 10000)
    assert now.fraction == pytest.approx(10000 / 12000)


def test_loading_models_is_no_pace():
    """The time left counted the minutes of loading, and fell to a tenth with the first documents."""
    book = ledger(*[(1000, 100)] * 10)
    for second in range(101):
        assert book.snapshot(float(second), 0).eta_s is None
    book.snapshot(100.0, 1)
    assert book.snapshot(105.0, 1, running=[(1000, 100, 50)]).eta_s is None, (
        "what an output token costs is not known yet"
    )
    book.finish(key(0), stats(1000, 100))
    assert book.snapshot(110.0, 1).eta_s == pytest.approx(90.0)


def test_a_resume_goes_on_where_the_run_was():
    """It began at 0% again; its documents before count for what they took, also towards what the others will."""
    before = stats(9000, 100, prefill_s=9.0, verify_s=1.0)
    book = ledger((1000, 200), (1000, 200), num_done=2, work=before)
    assert book.snapshot(1.0, 0).fraction == pytest.approx(10000 / (10000 + 2 * (1000 + 10 * 200 * 100 / 400)))
    book.finish(key(0), stats(1000, 50, prefill_s=1.0, verify_s=0.5))
    assert book.snapshot(11.0, 1).eta_s == pytest.approx(10.0)


def test_what_several_tasks_read_once_is_one_reading():
    """The counts of a row are sums over its tasks: taken for work, they let the end seem three times as near."""
    three = stats(3000, 100, prefill_s=1.0, verify_s=1.0)
    three.num_cached_tokens = 2000
    book = ledger((1000, 100), (1000, 100), num_done=1, work=three)
    assert book.snapshot(0.0, 1).fraction == pytest.approx(1 / 3)
    book.finish(key(0), three)
    now = book.snapshot(2.0, 1)
    assert (now.fraction, now.eta_s) == pytest.approx((2 / 3, 2.0))


def test_a_suspended_driver_holds_nobody_for_silent():
    """A virtual machine that was moved: every worker looked as if it had hung for an hour, and was killed."""
    seconds = [1000.0]
    clock = AwakeClock(lambda: seconds[0])
    plan = Scheduler(rows_of_length([5]), JobOptions(stall_s=60.0, document_deadline_s=60.0), leases_per_worker=1)
    plan.join("a", Place("host", "GPU 0"), clock())
    [(_, lease)] = plan.assign(clock())
    plan.report("a", 1, {lease.lease_id: 1}, clock())
    seconds[0] += 3600.0
    assert plan.stalled(clock()) == []
    assert plan.overdue(clock()) == []
    for _ in range(20):
        seconds[0] += MAX_GAP_S
        clock()
    assert plan.stalled(clock()) == ["a"], "and yet it is looked after"
