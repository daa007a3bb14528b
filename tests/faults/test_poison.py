"""A document that fails, and its neighbours, which do not."""

import pytest

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS

GOOD = [f"text number {number} " * (number + 1) for number in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("order, max_attempts", [("kill", 1), ("kill", 2), ("raise", 1)])
def test_a_poison_document_is_an_error_row_and_its_neighbours_are_done(order, max_attempts, job):
    """Even where no document has a second attempt."""
    run = job([*GOOD, order], max_attempts=max_attempts)
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert set(run.summaries()) == {f"d{row}" for row in range(4)}
    [poison] = run.errors().values()
    assert poison["doc_id"] == "d4"
    assert poison["stage"] == "decode"
    assert poison["attempts"] == max_attempts
    kind = {"kill": ("WorkerDied", True), "raise": ("ValueError", False)}
    assert (poison["error_class"], poison["retryable"]) == kind[order]
    assert poison["message"]


def files_of(output):
    """Every file of results, with its bytes and when it was written."""
    folders = ("summaries", "errors", "_run/parts")
    found = [path for folder in folders for path in (output / folder).glob("*.parquet")]
    return {str(path.relative_to(output)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@pytest.mark.slow
def test_retry_errors_in_vain_leaves_every_byte_as_it_is_and_counts_the_attempts(job):
    """Only a new part says that it was tried: what is done is not even written again.

    A row that says 1 after the tenth retry hides what it has cost.
    """
    run = job([*GOOD, "raise"])
    assert run.run() == EXIT_TOO_MANY_ERRORS
    before = files_of(run.output)
    num_attempts = run.errors()["d4"]["attempts"]
    assert {name.partition("/")[0] for name in before} == {"summaries", "errors", "_run"}
    assert run.run(retry_errors="all") == EXIT_TOO_MANY_ERRORS
    after = files_of(run.output)
    kept = {name: file for name, file in before.items() if not name.startswith("errors")}
    assert after.items() >= kept.items()
    assert len(after) == len(before) + 1
    assert run.errors()["d4"]["attempts"] == num_attempts + 1
    assert run.run(retry_errors="all") == EXIT_TOO_MANY_ERRORS
    assert run.errors()["d4"]["attempts"] == num_attempts + 2
