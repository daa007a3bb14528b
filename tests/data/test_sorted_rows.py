"""Rows in the order of the input, whatever the order in which they came."""

from contextlib import closing

import pyarrow as pa
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
