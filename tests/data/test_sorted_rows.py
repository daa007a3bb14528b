"""Rows in the order of the input, whatever the order in which they came."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.data.sorted_rows import SortedRows, cut

SCHEMA = pa.schema([("file", pa.int32()), ("row", pa.int64()), ("text", pa.string())])


def text_of(file: int, row: int) -> str:
    return f"text {row} of {file} " + "x" * (37 * row % 100)


@settings(max_examples=40)
@given(
    st.lists(st.sets(st.integers(0, 99), max_size=9), max_size=8), st.integers(1, 6), st.integers(1, 2000), st.randoms()
)
def test_every_window_has_its_rows_in_order(
    wanted: list[set[int]], most: int, buffer_bytes: int, draw: random.Random
) -> None:
    """In memory, in a temporary file, or in many of them; whether the run is about all rows of a file or a few."""
    windows = cut(map(sorted, wanted), most)
    keys = [(file, row) for file, rows in enumerate(wanted) for row in sorted(rows)]
    order = draw.sample(keys, len(keys))
    with SortedRows(SCHEMA, windows, buffer_bytes) as rows:
        for begin in range(0, len(order), 3):
            some = [{"file": file, "row": row, "text": text_of(file, row)} for file, row in order[begin : begin + 3]]
            rows.add(pa.Table.from_pylist(some, SCHEMA))
        taken = [rows.take(number).to_pylist() for number in range(len(windows))]
    assert [(row["file"], row["row"]) for window in taken for row in window] == keys
    assert all(row["text"] == text_of(row["file"], row["row"]) for window in taken for row in window)
    assert all(len(window) <= most for window in taken)


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the output folder that is full, and freeing that would not help."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with (
        SortedRows(SCHEMA, cut([range(1)], 1), buffer_bytes=1) as rows,
        pytest.raises(OSError, match=r"gone takes no more .*TMPDIR"),
    ):
        rows.add(pa.Table.from_pylist([{"file": 0, "row": 0, "text": "x"}], SCHEMA))
