"""A run in which most documents fail ends early, not in the morning."""

import pytest

from specextend.cluster.exits import EXIT_DONE, RunError
from specextend.cluster.progress import MIN_ENDED, ErrorGuard
from specextend.cluster.records import read_status
from specextend.data.inputs import DocumentError
from specextend.data.storage import resolve

BROKEN = DocumentError("RuntimeError", "the kernel is not there", "decode")
TOO_LONG = DocumentError("OverLength", "9000 tokens", "prompt")


@pytest.mark.parametrize("num_documents, least", [(200, MIN_ENDED), (50_000, 500)])
def test_a_few_documents_say_nothing_about_a_night(num_documents, least):
    """The longest go first: 150 of them that do not fit the memory are no reason to stop 100,000 others.

    Nor are documents that are at fault themselves: null texts and documents over length.
    """
    guard = ErrorGuard(0.5, num_documents)
    for _ in range(least):
        guard.count(TOO_LONG)
    for _ in range(least - 1):
        guard.count(BROKEN)
    guard.check()
    guard.count(BROKEN)
    with pytest.raises(RunError):
        guard.check()


@pytest.mark.slow
def test_a_run_that_stopped_early_keeps_what_is_done_and_goes_on_when_the_cause_is_mended(job, tmp_path):
    """The longest fail for as long as something is broken: an outage at midnight."""
    (tmp_path / "outage").touch()
    texts = [f"raise@{tmp_path}/outage and {row} more words" for row in range(MIN_ENDED)]
    texts += [f"crawl@{tmp_path}/outage {row}" for row in range(20)]  # none is done meanwhile
    run = job(texts, workers=1)
    run.max_batch_size = 1
    with pytest.raises(RunError, match=r"^stopped early: 100 of 100 .* ValueError, such as d\d+: this doc"):
        run.run()
    assert not (run.output / "summaries").exists()
    status = read_status(resolve(str(run.output)))
    assert status["state"] == "stopped, run again to resume"
    assert status["errors"] == 100
    assert status["left"] == 20
    (tmp_path / "outage").unlink()
    assert run.run(retry_errors="all") == EXIT_DONE
    assert len(run.summaries()) == 120
    assert max(run.column("attempts")) == 2, "those of the first start are counted"
