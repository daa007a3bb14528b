"""The parts are the only record of what is done."""

import pyarrow.parquet as pq
import pytest

from specextend.core import DocumentKey
from specextend.data.commits import (
    KEY_COLUMNS,
    CommitWriter,
    StrangeCommitError,
    commit_of,
    pending,
    read_commits,
    read_results,
)


def test_done_beats_error_and_later_beats_earlier(output, done, failed):
    """A run id is random: order by it and a retried row would be an error again in half of all runs."""
    CommitWriter(output, "ffffffff").commit([done(0, 0), failed(0, 1, "Early"), failed(0, 2), failed(1, 0, "Early")])
    CommitWriter(output, "00000000").commit([failed(0, 0), failed(0, 1, "Late"), done(0, 2)])
    progress = read_commits(output)
    assert progress.done == {DocumentKey(0, 0), DocumentKey(0, 2)}
    assert progress.errors == {DocumentKey(0, 1): "Late", DocumentKey(1, 0): "Early"}
    origins = {
        key: commit_of(table)[5:13]
        for table in read_results(output, KEY_COLUMNS)
        for key in zip(table["file"].to_pylist(), table["row"].to_pylist(), strict=True)
    }
    late, early = "0" * 8, "f" * 8
    assert origins == {(0, 0): early, (0, 2): late, (0, 1): late, (1, 0): early}


def test_only_error_rows_that_another_try_may_mend_are_retried_unless_all_are_asked_for(output, done, failed):
    """A null text fails every night; what its latest row says of it counts, not what an earlier one said."""
    outage = {"retryable": True}
    rows = [failed(0, 0), failed(0, 1) | outage, failed(0, 2), failed(0, 3) | outage, failed(0, 4)]
    CommitWriter(output, "ffffffff").commit(rows)
    CommitWriter(output, "00000000").commit([failed(0, 2) | outage, failed(0, 3), done(0, 4)])
    progress = read_commits(output)
    assert list(pending([range(5)], progress)) == []
    assert list(pending([range(5)], progress, retry_errors="retryable")) == [DocumentKey(0, 1), DocumentKey(0, 2)]
    assert list(pending([range(5)], progress, retry_errors="all")) == [DocumentKey(0, row) for row in range(4)]


def test_a_part_says_which_run_it_is_of(output, done):
    """One of another run is refused."""
    name = CommitWriter(output, "0000000a", "beef" * 16).commit([done(0, 0)])
    CommitWriter(output, "0000000b").commit([done(0, 1)])
    metadata = pq.read_schema(f"{output.path}/_run/parts/{name}").metadata
    assert metadata[b"specextend.run_id"] == b"0000000a"
    assert read_commits(output, "beef" * 16).done == {DocumentKey(0, 0), DocumentKey(0, 1)}
    with pytest.raises(StrangeCommitError, match=f"{name} is a commit of another run"):
        read_commits(output, "cafe" * 16)
