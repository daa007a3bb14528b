"""Runs about some rows of their input: planned, leased, killed, merged, resumed and finalized like any other."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.cluster.backlog import Backlog
from specextend.cluster.estimates import Estimates, RowSet, TokenEstimate
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter, pending, read_commits
from specextend.data.finalize import finalize, is_finalized
from specextend.data.fingerprint import build_manifest, write_manifest
from specextend.data.inputs import InputOptions
from specextend.data.run_folder import Counts
from specextend.data.selection import select_rows
from specextend.data.source import Source, open_source
from specextend.data.storage import resolve
from tests.properties.rows import done, failed, in_a_folder

WANTED = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=5).filter(
    lambda files: any(map(any, files))
)
"""Of each row of each file whether the filter wants it."""


def opened(folder: Path, limit: int) -> Source:
    options = InputOptions(path=str(folder / "in"), passthrough=("n", "file"), filter="wanted == True", limit=limit)
    return select_rows(open_source(options))


def fingerprint_of(source: Source) -> str:
    fingerprint: str = build_manifest(source, {"input": {"limit": source.options.limit}}, {})["fingerprint"]
    return fingerprint


@settings(max_examples=15)
@given(st.data(), WANTED, st.integers(1, 30))
def test_a_run_about_some_rows_plans_resumes_and_ends_with_those_alone(
    data: st.DataObject, wanted: list[list[bool]], limit: int
) -> None:
    """Row numbers of such a run have gaps, and its files are not those of the input: neither may be taken for granted.

    Windows, buffers and commits are small, so that they begin and end everywhere.
    """

    def check(folder: Path) -> None:
        for number, rows in enumerate(wanted):
            path = folder / "in" / f"file={number}" / "rows.parquet"
            path.parent.mkdir(parents=True)
            columns = {"text": ["x"] * len(rows), "n": [*range(len(rows))], "wanted": rows}
            kinds = {"text": pa.string(), "n": pa.int64(), "wanted": pa.bool_()}
            pq.write_table(pa.table(columns, schema=pa.schema(kinds.items())), path, row_group_size=3)
        chosen = [(file, row) for file, rows in enumerate(wanted) for row, is_wanted in enumerate(rows) if is_wanted]
        chosen = chosen[:limit]
        source, output = opened(folder, limit), resolve(str(folder / "out"))
        keys = [DocumentKey(file.number, row) for file in source.files for row in source.rows(file.number)]
        assert [(int(source.files[key.file].relative_path[5]), key.row) for key in keys] == chosen
        assert [row.key for row in source.scan()] == keys
        write_manifest(output, build_manifest(source, {"input": {"limit": limit}}, {}))
        for run_id, most in (("00000000", data.draw(st.integers(0, len(keys)))), ("00000001", len(keys))):
            source = opened(folder, limit)
            rows_of_files = [file.num_rows for file in source.files]
            left = RowSet(rows_of_files, pending(rows_of_files, read_commits(output), chosen=source.rows))
            estimates = Estimates.of({key: TokenEstimate(data.draw(st.integers(1, 9)), 1) for key in left})
            backlog = Backlog(estimates, [file.group_rows for file in source.files])
            leased = [backlog.take("a worker") for _ in left]
            assert sorted(filter(None, leased)) == list(left)
            groups = [(key.file, key.row // 3) for key in filter(None, leased)]
            assert len(list(groupby(groups))) == len(set(groups)), "a row group is read once"
            writer = CommitWriter(output, run_id, fingerprint_of(source))
            for key in data.draw(st.permutations(list(left)))[:most]:
                writer.commit([failed(key) if key.row % 4 == 3 else done(key)])
        num_errors = sum(row % 4 == 3 for _, row in chosen)
        buffer_bytes = data.draw(st.sampled_from([1, 1 << 20]))
        assert not is_finalized(source, output)
        assert finalize(source, output, buffer_bytes=buffer_bytes) == Counts(
            len(keys), len(keys) - num_errors, num_errors
        )
        assert is_finalized(source, output)
        found = pq.read_table(folder / "out" / "summaries", partitioning=None, columns=["file", "n"]).to_pylist()
        assert [(row["file"], row["n"]) for row in found] == [(f, n) for f, n in chosen if n % 4 != 3]

    in_a_folder(check)
