"""Rows in the order of the input, whatever the order in which they came."""

import random
import tempfile
from contextlib import closing

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.data.finalize import SortedRows

SCHEMA = pa.schema([("file", pa.int32()), ("row", pa.int64()), ("text", pa.string())])


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


def test_runs_of_many_batches_are_merged():
    """Each temporary file has more than is read of it at once."""
    keys = [(row % 3, row) for row in range(3000)]
    random.Random(1).shuffle(keys)
    tables = in_order(keys, 1 << 21, 100, lambda file, row: "x" * 4000)
    assert [(row["file"], row["row"]) for table in tables for row in table.to_pylist()] == sorted(keys)
    assert len(tables) > 12
    assert max(table.nbytes for table in tables) < 5 << 20


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch):
    """It is not the output folder that is full, and freeing that would not help."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with (
        closing(SortedRows(SCHEMA, buffer_bytes=1)) as rows,
        pytest.raises(OSError, match=r"gone takes no more .*TMPDIR"),
    ):
        rows.add(pa.Table.from_pylist([{"file": 0, "row": 0, "text": "x"}], SCHEMA))
