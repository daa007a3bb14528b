"""Whose fault it is that a document was not read: found out on real files."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster import arbiter
from specextend.cluster.arbiter import Arbiter, Verdict
from specextend.core import DocumentKey
from specextend.data.documents import InputOptions, Source, open_source
from specextend.data.inputs import InputChangedError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "id": ["x", "y", "z"]}), path, row_group_size=1)
    return path


@pytest.fixture
def source(path: Path) -> Source:
    return open_source(InputOptions(path=str(path), id_column="id"))


def spoil(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second group's texts become noise that nobody notices from outside."""
    column = pq.read_metadata(path).row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(path.read_bytes())
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    monkeypatch.setattr(Source, "check_unchanged", lambda source, number: None)


def test_a_document_that_the_driver_reads_is_not_at_fault(source: Source):
    """A null text is a matter of the row, which a worker that reads it will say."""
    verdicts = [Arbiter(source).judge(DocumentKey(0, row)) for row in range(3)]
    assert verdicts == [Verdict.READABLE] * 3


def test_a_damaged_group_is_the_documents_own_and_its_id_is_still_known(source: Source, path: Path, monkeypatch):
    spoil(path, monkeypatch)
    judge = Arbiter(source)
    assert [judge.judge(DocumentKey(0, row)) for row in range(3)] == [
        Verdict.READABLE,
        Verdict.DAMAGED,
        Verdict.READABLE,
    ]
    assert judge.doc_id(DocumentKey(0, 1)) == "y"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_is_another_one_ends_the_run(source: Source, path: Path, is_there: bool):
    pq.write_table(pa.table({"text": ["other"], "id": ["x"]}), path)
    if not is_there:
        path.unlink()
    with pytest.raises(InputChangedError):
        Arbiter(source).judge(DocumentKey(0, 0))


def test_a_store_that_never_answers_is_asked_once_and_holds_nobody(source: Source, monkeypatch):
    """A hard NFS mount whose server is gone: the call does not return, and cannot be interrupted."""
    answer, calls = threading.Event(), []

    def hang(source: Source, number: int) -> None:
        calls.append(number)
        answer.wait()

    monkeypatch.setattr(arbiter, "LOOK_S", 0.1)
    monkeypatch.setattr(Source, "check_unchanged", hang)
    judge = Arbiter(source)
    assert judge.judge(DocumentKey(0, 0)) is Verdict.OUT_OF_REACH
    assert judge.judge(DocumentKey(0, 2)) is Verdict.OUT_OF_REACH
    assert judge.doc_id(DocumentKey(0, 2)) == "a.parquet:2"
    assert len(calls) == 1
    answer.set()
