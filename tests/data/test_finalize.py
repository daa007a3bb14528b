"""An input row ends in exactly one output row, in its place."""

import os
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from scripts.simulated_store import SimulatedStore
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.finalize import SortedRows, finalize, unfinished
from specextend.data.run_folder import Counts
from specextend.data.schema import summary_fields
from specextend.data.storage import Location, exists
from specextend.report import RunFigures, write_report
from tests.damage import damage
from tests.data.conftest import commit_all, opened
from tests.job.conftest import rows as rows_of
from tests.properties.rows import done, failed


@pytest.fixture
def source(tmp_path, write):
    """Three files of 3, 0 and 2 rows."""
    write("in/a.parquet", {"text": ["x"] * 3, "topic": [[{"name": "a0"}], None, []], "n": [0, 1, 2]})
    write("in/b.parquet", {"text": pa.array([], "string"), "topic": [], "n": []})
    write("in/c.parquet", {"text": ["x"] * 2, "topic": [None, None], "n": [3, 4]})
    return opened(tmp_path / "in", passthrough=("n", "topic"))


def read(output, folder, number):
    with output.filesystem.open_input_file(f"{output.path}/{folder}/part-{number:05d}.parquet") as file:
        return pq.read_table(file)


@pytest.fixture
def finished(source, output):
    """An output whose every row is done."""
    commit_all(source, output)
    finalize(source, output)
    return output


@pytest.mark.parametrize("where", ["end", "footer", "byte"])
def test_damaged_summaries_are_written_again(where, source, finished):
    """The parts are whole, so nothing is lost, and nobody has to find out which file to delete."""
    whole = read(finished, "summaries", 2)
    assert unfinished(source, finished) == []
    damage(Path(finished.path) / "summaries" / "part-00002.parquet", where)
    assert unfinished(source, finished) == ["part-00002.parquet"]
    assert finalize(source, finished) == Counts(5, 5, 0)
    assert read(finished, "summaries", 2) == whole


@pytest.mark.parametrize("num_files", range(6))
def test_a_finalize_that_was_killed_anywhere_is_made_good_by_the_next(num_files, source, output):
    """Each file is whole or not there, so a second finalize only adds what is missing. An input file has one file of
    results, and rows stand in its order.
    """
    writer = CommitWriter(output, "0000000a")
    writer.commit([done(DocumentKey(2, 1)), done(DocumentKey(0, 2))])
    writer.commit([failed(DocumentKey(2, 0)), done(DocumentKey(0, 0)), failed(DocumentKey(0, 1))])
    left = iter(range(num_files))

    def replace(old, new, rename=os.replace):
        if next(left, None) is None:
            raise KeyboardInterrupt
        rename(old, new)

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        finalize(source, output)
    assert finalize(source, output) == Counts(5, 3, 2)
    assert [read(output, "summaries", number)["doc_id"].to_pylist() for number in range(3)] == [
        ["0.parquet:0", "0.parquet:2"],
        [],
        ["2.parquet:1"],
    ]
    assert read(output, "summaries", 0).schema.equals(pa.schema([*summary_fields(), *source.passthrough_fields]))
    assert read(output, "summaries", 0)["topic"].to_pylist() == [[{"name": "a0"}], []]
    errors = [(row["doc_id"], row["n"]) for row in rows_of(Path(output.path, "errors"))]
    assert errors == [("0.parquet:1", 1), ("2.parquet:0", 3)]
    assert not exists(output.child("errors", "part-00001.parquet"))
    assert not list(Path(output.path).rglob(".*")), "no litter of the killed one is left"


@pytest.mark.slow
def test_a_bit_that_changes_in_a_footer_changes_no_row_unnoticed(source, finished):
    """Pages have checksums and a footer none: of 3,000 bits 129 renamed a column, changed a value or lost the rows."""
    file = Path(finished.path) / "summaries" / "part-00000.parquet"
    whole = file.read_bytes()
    table = read(finished, "summaries", 0)
    for place in range(0, len(whole), 97):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert unfinished(source, finished) or read(finished, "summaries", 0).equals(table), place


def test_the_end_of_a_run_reads_each_commit_once(tmp_path, write):
    """On an object store each request takes tens of milliseconds; 55 hours for ten million documents, once."""
    source = opened(write("a.parquet", {"text": ["x"] * 60}))
    requests = []
    for num_parts in (20, 60):
        store = SimulatedStore(latency_s=0.0)
        figures = RunFigures()
        output = Location(fs.PyFileSystem(store), f"{tmp_path}/output-{num_parts}")
        writer = CommitWriter(output, "0000000a")
        for part in range(num_parts):
            writer.commit([done(DocumentKey(0, row)) for row in range(part, 60, num_parts)])
        before = store.tally.requests
        finalize(source, output, observe=figures.add)
        report = write_report(output.path, output, figures=figures)
        requests.append(store.tally.requests - before)
        assert report["rows"]["done"] == 60
    assert requests[1] - requests[0] == 2 * 40, "its size is asked for, and then it is read"


SCHEMA = pa.schema([("file", "int32"), ("row", "int64"), ("text", "string")])


def text_of(file, row):
    return f"text {row} of {file} " + "x" * (37 * row % 100)


def in_order(keys, buffer_bytes, step, text_of=text_of):
    """Tables of rows that are added in the order of their keys, some at a time."""
    with closing(SortedRows(SCHEMA, buffer_bytes)) as rows:
        for begin in range(0, len(keys), step):
            some = [{"file": file, "row": row, "text": text_of(file, row)} for file, row in keys[begin : begin + step]]
            rows.add(pa.Table.from_pylist(some, SCHEMA))
        return list(rows.tables())


@settings(max_examples=40)
@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=60), st.integers(1, 4000), st.randoms())
def test_rows_come_in_order(wanted, buffer_bytes, draw):
    """From memory, from a temporary file, or from many of them."""
    keys = sorted(wanted)
    tables = in_order(draw.sample(keys, len(keys)), buffer_bytes, 3)
    taken = [row for table in tables for row in table.to_pylist()]
    assert [(row["file"], row["row"], row["text"]) for row in taken] == [(*key, text_of(*key)) for key in keys]
