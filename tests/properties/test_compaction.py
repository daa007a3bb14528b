"""Small commits become large ones, and whoever is killed meanwhile, or reads meanwhile, finds every row once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import DocumentKey
from specextend.data.compaction import compact
from specextend.data.finalize import finalize
from specextend.data.parts import ORIGIN, PartWriter, list_parts
from specextend.data.results import find_results, read_results
from specextend.data.run_folder import Counts
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location, resolve
from tests.properties.rows import done, failed, in_a_folder, source_of
from tests.properties.test_resume import History, Killed, stamps

MERGED_BYTES = st.sampled_from([60_000, 150_000, 1 << 20])
"""Of which a part of a few rows takes a fraction: two, five or all of them become one."""


class DeadAfter:
    """A gate behind which the process is killed before its write number `left`, and writes nothing any more."""

    def __init__(self, left: int) -> None:
        self.left = left

    def touch(self) -> None:
        pass

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def contents(output: Location) -> dict[tuple[int, int], dict[str, Any]]:
    """The results that count, with where they were committed; there is one for each row."""
    rows = [row for table in read_results(output, [*PART_SCHEMA.names, *ORIGIN]) for row in table.to_pylist()]
    by_key = {(row["file"], row["row"]): row for row in rows}
    assert len(by_key) == len(rows)
    return by_key


@settings(max_examples=6)
@given(st.data(), MERGED_BYTES)
def test_a_driver_killed_at_any_write_of_a_merge_has_lost_and_doubled_nothing(
    data: st.DataObject, merged_bytes: int
) -> None:
    """Before the merged part has its name, between two deletions, after the last: and the next start merges on."""

    def check(folder: Path) -> None:
        history = History(folder, data)
        history.start(retry_errors=False, to_its_end=False)
        history.start(retry_errors=False, to_its_end=True)
        history.start(retry_errors=True, to_its_end=True)
        before, num_parts = contents(history.output), len(list_parts(history.output))
        for left in data.draw(st.sets(st.integers(0, 3 * num_parts), max_size=6)):
            try:
                compact(history.output.behind(DeadAfter(left)), "", lambda: None, 1, merged_bytes)
            except Killed:
                assert contents(history.output) == before
        fewer = compact(history.output, "", most_parts=1, merged_bytes=merged_bytes)
        assert contents(history.output) == before
        assert fewer == 0 or num_parts > 1
        num_done = sum(map(bool, history.expected.values()))
        rows = len(history.keys)
        assert finalize(history.source, history.output) == Counts(rows, num_done, rows - num_done)
        history.check()

    in_a_folder(check)


def written(folder: Path, output: Location) -> list[dict[str, Any]]:
    """A run of 8 rows in 8 commits of two starts, one row of which failed before it was done."""
    source_of(folder / "input", [5, 3])
    keys = [DocumentKey(0, row) for row in range(5)] + [DocumentKey(1, row) for row in range(3)]
    rows = [done(key, f"of {key}") for key in keys]
    first, later = PartWriter(output, "ffffffff", "beef"), keys[4:]
    for row in [failed(keys[6]), *rows[:4]]:
        first.commit([row])
    second = PartWriter(output, "00000000", "beef")
    for row in rows[4 : 4 + len(later)]:
        second.commit([row])
    return rows


def test_a_merged_part_says_where_its_rows_were_committed(tmp_path: Path) -> None:
    """The wall clock of a start counts its documents, and the metadata of a file names the starts of its rows."""
    output = resolve(str(tmp_path / "output"))
    written(tmp_path, output)
    before = find_results(output)
    names = list_parts(output)
    assert compact(output, "beef", most_parts=9) == 0, "nine are few"
    assert compact(output, "beef", most_parts=8) == 8
    assert list_parts(output) == names[-1:], "under the name of the last, which older versions know"
    after = find_results(output)
    everything = slice(None)
    assert after.digest(everything) == before.digest(everything)
    assert after.run_ids(everything) == before.run_ids(everything) == ["ffffffff", "00000000"]
    table = pq.read_table(f"{output.path}/_run/parts/{names[-1]}")
    assert table.num_rows == 8, "the failed try of a row that is done counts no more"
    assert table.schema.metadata[b"specextend.fingerprint"] == b"beef"
    assert PartWriter(output, "0000000a").commit([done(DocumentKey(0, 0))]) == "part-0000000a-000009.parquet"


def test_summaries_stay_as_they_are_when_commits_are_merged(tmp_path: Path) -> None:
    """Their results are the same: ten thousand files would have been written again for one retried row."""
    source, output = source_of(tmp_path / "in", [5, 3]), resolve(str(tmp_path / "output"))
    written(tmp_path, output)
    finalize(source, output)
    results = {folder: stamps(Path(output.path, folder)) for folder in ("summaries", "errors")}
    compact(output, "beef", most_parts=1)
    finalize(source, output)
    assert {folder: stamps(Path(output.path, folder)) for folder in ("summaries", "errors")} == results


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_who_reads_while_commits_are_merged_finds_every_row_once(tmp_path: Path, num_read: int) -> None:
    """`--status` and a report of a run that is going: the commits that they have listed are gone."""
    output = resolve(str(tmp_path / "output"))
    rows = written(tmp_path, output)
    found = read_results(output, PART_SCHEMA.names)
    tables = [next(found) for _ in range(num_read)]
    compact(output, "beef", most_parts=1)
    table = pa.concat_tables([*tables, *found])
    assert sorted(table["summary"].to_pylist()) == sorted(row["summary"] for row in rows)
