"""A run in which most documents fail ends early, not in the morning."""

from __future__ import annotations

from pathlib import Path

import pytest

from specextend.cluster.exits import EXIT_DONE, EXIT_TOO_MANY_ERRORS, TooManyErrorsError, exit_code
from specextend.cluster.messages import Failed
from specextend.cluster.progress import MIN_ENDED, ErrorGuard
from specextend.cluster.records import read_status
from specextend.data.storage import resolve

BROKEN = Failed("", "RuntimeError", "the kernel is not there", "decode", retryable=False)
TOO_LONG = Failed("", "OverLength", "9000 tokens", "prompt", retryable=False)
OUT_OF_REACH = Failed("", "OSError", "no such group", "read", retryable=True)


def test_a_run_in_which_most_documents_fail_stops_and_says_why():
    guard = ErrorGuard(0.5, 1000)
    for number in range(MIN_ENDED // 2):
        guard.done()
        guard.failed(f"d{number}", BROKEN if number % 5 else OUT_OF_REACH)
    guard.check()
    guard.failed("last", BROKEN)
    with pytest.raises(TooManyErrorsError) as end:
        guard.check()
    assert str(end.value) == (
        "stopped early: 51 of 101 documents failed, more than job.stop_error_fraction 0.5 allows, most often with "
        "RuntimeError, such as d1: the kernel is not there; what is done is kept: fix the cause and run again with "
        "--retry-errors, or allow more"
    )
    assert exit_code(end.value) == EXIT_TOO_MANY_ERRORS


@pytest.mark.parametrize(("num_documents", "least"), [(200, MIN_ENDED), (50_000, 500)])
def test_a_few_documents_say_nothing_about_a_night(num_documents: int, least: int):
    """The longest go first: 150 of them that do not fit the memory are no reason to stop 100,000 others."""
    guard = ErrorGuard(0.5, num_documents)
    for number in range(least - 1):
        guard.failed(f"d{number}", BROKEN)
    guard.check()
    guard.failed("last", BROKEN)
    with pytest.raises(TooManyErrorsError):
        guard.check()


def test_documents_that_are_at_fault_themselves_stop_nobody():
    """Null texts and documents over length are known before any model is loaded, and fail fast."""
    guard = ErrorGuard(0.0, 200)
    for number in range(10 * MIN_ENDED):
        guard.failed(f"d{number}", TOO_LONG)
    guard.check()


def test_a_limit_of_one_stops_nobody():
    guard = ErrorGuard(1.0, 200)
    for number in range(10 * MIN_ENDED):
        guard.failed(f"d{number}", BROKEN)
    guard.check()


@pytest.mark.slow
def test_a_run_that_stopped_early_keeps_what_is_done_and_goes_on_when_the_cause_is_mended(job, tmp_path: Path):
    """The longest fail for as long as something is broken: an outage at midnight."""
    (tmp_path / "outage").touch()
    texts = [f"raise@{tmp_path}/outage and {row} more words" for row in range(MIN_ENDED)]
    texts += [f"crawl@{tmp_path}/outage {row}" for row in range(20)]  # none is done meanwhile
    run = job(texts, workers=1)
    run.max_batch_size = 1
    with pytest.raises(TooManyErrorsError, match=r"^stopped early: 100 of 100 .* ValueError, such as d\d+: this doc"):
        run.run()
    assert not (run.output / "summaries").exists()
    status = read_status(resolve(str(run.output)))
    assert (status["state"], status["errors"], status["left"]) == ("stopped, run again to resume", 100, 20)
    (tmp_path / "outage").unlink()
    assert run.run(retry_errors="all") == EXIT_DONE
    assert len(run.summaries()) == 120
    assert max(row["attempts"] for row in run.summaries().values()) == 2, "those of the first start are counted"
