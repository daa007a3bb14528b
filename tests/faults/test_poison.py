"""A document that fails, and its neighbours, which do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.leases import Limits
from specextend.cluster.places import Place, Spot
from specextend.cluster.scheduler import Scheduler
from specextend.core import DocumentKey

GOOD = [f"text number {number} " * (number + 1) for number in range(4)]


@pytest.mark.parametrize("is_reported", [True, False])
def test_with_one_attempt_in_all_a_neighbours_death_leaves_a_document_its_own(is_reported):
    """A batch that dies does not say whose fault it was: only an attempt alone can."""
    documents = [(DocumentKey(0, row), 3 - row) for row in range(2)]
    plan = Scheduler(documents, Limits(max_attempts=1), leases_per_worker=2)
    plan.join("a", Place("node", Spot("host", "seat 1")), 0)
    leases = [lease.lease_id for _, lease in plan.assign(0)]
    assert len(leases) == 2
    if is_reported:
        plan.report("a", 1, leases, 1)
        assert plan.leave("a", "WorkerDied", "gone") == []
    else:
        assert [plan.blame(lease, "ValueError", "why") for lease in leases] == [[], []]
        plan.leave("a", "WorkerDied", "gone")
    plan.join("b", Place("node", Spot("host", "seat 1")), 2)
    [(_, lease)] = plan.assign(2)
    assert lease.attempt == 1
    [given_up] = plan.leave("b", "WorkerDied", "gone again")
    assert (given_up.key, given_up.attempts) == (lease.key, 1)
    assert plan.num_open == 1


@pytest.mark.slow
@pytest.mark.parametrize("order", ["kill", "raise"])
@pytest.mark.parametrize("attempt", range(3))
def test_a_poison_document_is_an_error_row_and_its_neighbours_are_done(attempt, order, job):
    """Even where no document has a second attempt."""
    run = job([*GOOD, order], max_attempts=1)
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert set(run.summaries()) == {f"d{row}" for row in range(4)}
    [poison] = run.errors().values()
    assert (poison["doc_id"], poison["stage"], poison["attempts"]) == ("d4", "decode", 1)
    kind = {"kill": ("WorkerDied", True), "raise": ("ValueError", False)}
    assert (poison["error_class"], poison["retryable"]) == kind[order]
    assert poison["message"]


def test_a_failure_that_is_a_documents_own_is_not_tried_again(job):
    """It would fail the same way: once in its batch, once alone to be sure, however many attempts there are."""
    run = job([*GOOD, "raise", None], max_attempts=9, silence_s=6000)
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert set(run.summaries()) == {f"d{row}" for row in range(4)}
    assert run.errors()["d4"]["attempts"] <= 2
    assert run.errors()["d5"]["attempts"] == 1


def files_of(output: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of results, with its bytes and when it was written."""
    folders = ("summaries", "errors", "_run/parts")
    found = [path for folder in folders for path in (output / folder).glob("*.parquet")]
    return {str(path.relative_to(output)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@pytest.mark.slow
def test_retry_errors_in_vain_leaves_every_byte_as_it_is(job):
    """Only a new part says that it was tried: what is done is not even written again."""
    run = job([*GOOD, "raise"])
    assert run.run() == EXIT_TOO_MANY_ERRORS
    before = files_of(run.output)
    assert {name.partition("/")[0] for name in before} == {"summaries", "errors", "_run"}
    assert run.run(retry_errors="all") == EXIT_TOO_MANY_ERRORS
    after = files_of(run.output)
    kept = {name: file for name, file in before.items() if not name.startswith("errors")}
    assert after.items() >= kept.items()
    assert len(after) == len(before) + 1
