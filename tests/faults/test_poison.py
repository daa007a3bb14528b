"""A document that kills its worker, and its neighbours, which do not."""

import pytest

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS

GOOD = [f"text number {number} " * (number + 1) for number in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_poison_document_is_an_error_row_and_its_neighbours_are_done(max_attempts, job):
    """Even where no document has a second attempt."""
    run = job([*GOOD, "kill"], max_attempts=max_attempts)
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert set(run.summaries()) == {f"d{row}" for row in range(4)}
    [poison] = run.errors().values()
    assert (poison["doc_id"], poison["stage"], poison["attempts"]) == ("d4", "decode", max_attempts)
    assert (poison["error_class"], poison["retryable"]) == ("WorkerDied", True)
    assert poison["message"]
