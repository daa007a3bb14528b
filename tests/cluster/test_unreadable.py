"""What a worker could not read, and what an output folder does not take: whose fault it is, on real files."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.driver import is_damaged_row
from specextend.core import DocumentKey
from specextend.data import source as source_module
from specextend.data.inputs import InputOptions
from specextend.data.source import Source, open_source


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "id": ["x", "y", "z"]}), path, row_group_size=1)
    return path


@pytest.fixture
def source(path: Path) -> Source:
    return open_source(InputOptions(path=str(path), id_column="id"))


def spoil(path: Path) -> None:
    """Turn the second group's texts into noise, and leave the file's size and time as they are."""
    column = pq.read_metadata(path).row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    data, times = bytearray(path.read_bytes()), path.stat()
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def verdicts(source: Source) -> list[bool]:
    return [is_damaged_row(source, DocumentKey(0, row)) for row in range(3)]


def test_a_damaged_group_is_the_documents_own_fault_and_its_id_is_still_known(source: Source, path: Path):
    """A null text is the row's own, too, but a worker that reads it reports that. No cached row counts."""
    assert verdicts(source) == [False, False, False]
    spoil(path)
    assert verdicts(source) == [False, True, False]
    assert source.doc_id(DocumentKey(0, 1)) == "y"


def test_a_file_that_does_not_open_makes_no_error_rows(source: Source, monkeypatch):
    """S3 whose key was taken away answers HEAD and not GET: that is no fault of a hundred thousand documents."""

    def denied(*arguments: object) -> None:
        raise PermissionError("access denied")

    monkeypatch.setattr(source_module, "open_parquet", denied)
    assert verdicts(source) == [False, False, False]
