"""Stores that fail or do not answer: who waits for them, for how long, and whose fault is found, on real files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster import stores
from specextend.cluster.exits import OutputError
from specextend.cluster.stores import CHECKS, Arbiter, OutputGate, Ruling, using, within, writing
from specextend.core import DocumentKey
from specextend.data import source as source_module
from specextend.data.inputs import InputChangedError, InputOptions
from specextend.data.source import Source, open_source
from specextend.data.storage import Location, resolve
from tests.job.conftest import LONGEST_S, wait_for


def test_a_call_that_never_returns_is_left_behind():
    """A dead mount: the thread that asks cannot be stopped, and meanwhile the job must hear Ctrl-C."""
    checkpoints, answer = [], threading.Event()
    with pytest.raises(TimeoutError, match=r"^no answer for 0\.2 s$"):
        within(0.2, answer.wait, lambda: checkpoints.append(None))
    assert checkpoints
    answer.set()


def test_a_call_gives_what_it_returns_and_raises_what_it_raises():
    """A caller sees no thread."""
    assert within(60.0, lambda: "answer") == "answer"
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)


@pytest.fixture
def output() -> Location:
    return resolve("/somewhere")


def test_a_request_that_does_not_come_back_is_given_up(output: Location):
    """The thread that waits cannot be stopped: another one has to say so."""
    given_up = threading.Event()
    gate = OutputGate(0.1, given_up.set)
    with using(output.behind(gate)):
        assert given_up.wait(60)


@dataclass
class Checks:
    """Stands where a gate has the event that its watch waits for between two checks: a script is played there, which
    yields when it is time for a check.
    """

    script: Future[Iterator[bool]] = field(default_factory=Future)

    def wait(self, seconds: float) -> bool:
        return next(self.script.result(), True)


def test_many_requests_may_take_long_together_and_time_between_blocks_does_not_count(output: Location, monkeypatch):
    """Ten thousand parts are read in an hour; decoding takes a night."""
    checks, given_up, survived = Checks(), threading.Event(), []
    monkeypatch.setattr(stores, "threading", SimpleNamespace(Event=lambda: checks, Thread=threading.Thread))
    gate = OutputGate(1.5, given_up.set)
    watched = output.behind(gate)

    def script() -> Iterator[bool]:
        with using(watched):
            for _ in range(10):
                watched.touch()
                yield from repeat(False, CHECKS - 5)
        survived.append("many requests")
        yield from repeat(False, 2 * CHECKS)
        survived.append("a night")
        with using(watched):
            yield from repeat(False, CHECKS)  # the first one sees that the block has begun
            survived.append("a slow request")
            yield False
            survived.append("a request without an answer")

    checks.script.set_result(script())
    assert given_up.wait(LONGEST_S)
    assert survived == ["many requests", "a night", "a slow request"]


def test_what_a_file_system_has_against_a_write_is_one_line_and_other_errors_are_themselves(output: Location):
    """Exit 1 and what to do, not a traceback."""
    why = r"^/somewhere cannot be written to: disk full; what was committed is there, run again to resume$"
    with pytest.raises(OutputError, match=why), writing(output):
        raise OSError("disk full\nand more")
    with pytest.raises(ZeroDivisionError), writing(output):
        raise ZeroDivisionError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "id": ["x", "y", "z"]}), path, row_group_size=1)
    return path


@pytest.fixture
def source(path: Path) -> Source:
    return open_source(InputOptions(path=str(path), id_column="id"))


def arbiter_of(source: Source | Silent) -> Arbiter:
    return Arbiter(source, before_long=lambda: None)


def spoil(path: Path) -> None:
    """Turn the second group's texts into noise, and leave the file's size and time as they are."""
    column = pq.read_metadata(path).row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    data, times = bytearray(path.read_bytes()), path.stat()
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_document_that_the_driver_reads_is_not_at_fault(source: Source):
    """A null text is the row's own fault, which a worker that reads it reports."""
    verdicts = [arbiter_of(source).judge(DocumentKey(0, row)) for row in range(3)]
    assert verdicts == [Ruling.READABLE] * 3


def test_a_damaged_group_is_the_documents_own_and_its_id_is_still_known(source: Source, path: Path):
    spoil(path)
    arbiter = arbiter_of(source)
    assert [arbiter.judge(DocumentKey(0, row)) for row in range(3)] == [
        Ruling.READABLE,
        Ruling.DAMAGED,
        Ruling.READABLE,
    ]
    assert arbiter.doc_id(DocumentKey(0, 1)) == "y"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_is_another_one_ends_the_run(source: Source, path: Path, is_there: bool):
    pq.write_table(pa.table({"text": ["other"], "id": ["x"]}), path)
    if not is_there:
        path.unlink()
    with pytest.raises(InputChangedError):
        arbiter_of(source).judge(DocumentKey(0, 0))


@dataclass
class Silent:
    """Stands where a source stands whose store never answers, until it is told to."""

    answer: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)

    def check_unchanged(self, number: int) -> None:
        self.asked.append(number)
        self.answer.wait()

    def place(self, key: DocumentKey) -> str:
        return f"a.parquet:{key.row}"


def test_a_store_that_never_answers_is_asked_once_and_holds_nobody():
    """A hard NFS mount whose server is gone: the call does not return, and cannot be interrupted."""
    store, told = Silent(), []
    arbiter = Arbiter(store, lambda: told.append("commit"), patience_s=0.1, reread_s=0.1)
    assert not arbiter.is_spent
    assert arbiter.judge(DocumentKey(0, 0)) is Ruling.OUT_OF_REACH
    assert told == ["commit"], "finished rows are on disk before the wait gets long"
    assert arbiter.is_spent
    assert arbiter.judge(DocumentKey(0, 2)) is Ruling.OUT_OF_REACH
    assert arbiter.doc_id(DocumentKey(0, 2)) == "a.parquet:2"
    wait_for(lambda: store.asked, "question")
    assert len(store.asked) == 1
    arbiter.begin_turn()
    assert not arbiter.is_spent
    store.answer.set()


def test_a_file_that_can_be_asked_for_but_not_opened_is_out_of_reach(source: Source, monkeypatch):
    """S3 whose key was taken away answers HEAD and not GET: that is no fault of a hundred thousand documents."""

    def denied(*arguments: object) -> None:
        raise PermissionError("access denied")

    monkeypatch.setattr(source_module, "open_parquet", denied)
    assert arbiter_of(source).judge(DocumentKey(0, 0)) is Ruling.OUT_OF_REACH


class Starved(Silent):
    """Stands where a source stands in a process that has no memory left."""

    def check_unchanged(self, number: int) -> None:
        pass

    def read(self, key: DocumentKey) -> None:
        raise pa.ArrowMemoryError("no room")

    def opens(self, number: int) -> bool:
        return True


def test_a_driver_without_memory_finds_no_document_at_fault():
    """Pyarrow's MemoryError is one of its own exceptions, like that of a damaged page."""
    assert arbiter_of(Starved()).judge(DocumentKey(0, 0)) is Ruling.OUT_OF_REACH


def test_what_nobody_foresaw_is_raised_and_not_lost_in_a_thread(source: Source):
    with pytest.raises(IndexError, match="is not in the input"):
        arbiter_of(source).judge(DocumentKey(0, 99))


def test_every_re_read_asks_the_store(source: Source, path: Path):
    """A cached row may be older than what the workers see."""
    arbiter = arbiter_of(source)
    assert arbiter.judge(DocumentKey(0, 1)) is Ruling.READABLE
    spoil(path)
    assert arbiter.judge(DocumentKey(0, 1)) is Ruling.DAMAGED
