"""Whose fault it is that a document was not read: found out on real files."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster import arbiter
from specextend.cluster.arbiter import Arbiter, Ruling
from specextend.core import DocumentKey
from specextend.data import source as source_module
from specextend.data.inputs import InputChangedError, InputOptions
from specextend.data.source import Source, open_source


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "id": ["x", "y", "z"]}), path, row_group_size=1)
    return path


@pytest.fixture
def source(path: Path) -> Source:
    return open_source(InputOptions(path=str(path), id_column="id"))


def looking(source: Source) -> Arbiter:
    return Arbiter(source, before_long=lambda: None)


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
    verdicts = [looking(source).judge(DocumentKey(0, row)) for row in range(3)]
    assert verdicts == [Ruling.READABLE] * 3


def test_a_damaged_group_is_the_documents_own_and_its_id_is_still_known(source: Source, path: Path, monkeypatch):
    spoil(path, monkeypatch)
    judge = looking(source)
    assert [judge.judge(DocumentKey(0, row)) for row in range(3)] == [
        Ruling.READABLE,
        Ruling.DAMAGED,
        Ruling.READABLE,
    ]
    assert judge.doc_id(DocumentKey(0, 1)) == "y"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_is_another_one_ends_the_run(source: Source, path: Path, is_there: bool):
    pq.write_table(pa.table({"text": ["other"], "id": ["x"]}), path)
    if not is_there:
        path.unlink()
    with pytest.raises(InputChangedError):
        looking(source).judge(DocumentKey(0, 0))


def test_a_store_that_never_answers_is_asked_once_and_holds_nobody(source: Source, monkeypatch):
    """A hard NFS mount whose server is gone: the call does not return, and cannot be interrupted."""
    answer, calls, told = threading.Event(), [], []

    def hang(source: Source, number: int) -> None:
        calls.append(number)
        answer.wait()

    monkeypatch.setattr(arbiter, "LOOK_S", 0.1)
    monkeypatch.setattr(arbiter, "PATIENCE_S", 0.1)
    monkeypatch.setattr(Source, "check_unchanged", hang)
    judge = Arbiter(source, before_long=lambda: told.append("commit"))
    assert not judge.is_tired
    assert judge.judge(DocumentKey(0, 0)) is Ruling.OUT_OF_REACH
    assert told == ["commit"], "what is done is on disk before it gets long"
    assert judge.is_tired
    assert judge.judge(DocumentKey(0, 2)) is Ruling.OUT_OF_REACH
    assert judge.doc_id(DocumentKey(0, 2)) == "a.parquet:2"
    assert len(calls) == 1
    judge.rest()
    assert not judge.is_tired
    answer.set()


def test_a_file_that_can_be_asked_for_but_not_opened_is_out_of_reach(source: Source, monkeypatch):
    """S3 whose key was taken away answers HEAD and not GET: that is no fault of a hundred thousand documents."""

    def denied(*arguments: object) -> None:
        raise PermissionError("access denied")

    monkeypatch.setattr(source_module, "open_parquet", denied)
    assert looking(source).judge(DocumentKey(0, 0)) is Ruling.OUT_OF_REACH


def test_a_driver_without_memory_finds_no_document_at_fault(source: Source, monkeypatch):
    """Pyarrow's MemoryError is one of its own exceptions, like that of a damaged page."""

    def starve(source: Source, key: DocumentKey) -> None:
        raise pa.ArrowMemoryError("no room")

    monkeypatch.setattr(Source, "read", starve)
    assert looking(source).judge(DocumentKey(0, 0)) is Ruling.OUT_OF_REACH


def test_what_nobody_foresaw_is_raised_and_not_lost_in_a_thread(source: Source):
    with pytest.raises(IndexError, match="is not in the input"):
        looking(source).judge(DocumentKey(0, 99))


def test_every_look_is_a_fresh_one(source: Source, path: Path, monkeypatch):
    """What it remembers may be older than what the workers see."""
    judge = looking(source)
    assert judge.judge(DocumentKey(0, 1)) is Ruling.READABLE
    spoil(path, monkeypatch)
    assert judge.judge(DocumentKey(0, 1)) is Ruling.DAMAGED
