"""What cannot be read: at one worker, at all of them for a while, or at all."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specextend import config
from specextend.cluster import scheduler
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_TOO_MANY_ERRORS,
    RunError,
    exit_code,
)
from specextend.data.inputs import InputUnreachableError
from specextend.data.source import Source
from tests.cluster.fakes import FakeEngine
from tests.faults.conftest import during
from tests.job.conftest import wait_for

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing a process's root needs root")
TEXTS = [f"text number {number} " * (number + 1) for number in range(12)]


@dataclass(frozen=True)
class LacksTheMount:
    """Makes engines; the processes of the first ones see nothing of the file system from then on."""

    folder: Path
    number: int

    def __call__(self, config):
        engine = FakeEngine(config)
        for place in range(self.number):
            with suppress(FileExistsError):
                (self.folder / f"empty-{place}").mkdir()
                os.chroot(self.folder / f"empty-{place}")
                break
        return engine


@needs_root
@pytest.mark.slow
def test_what_most_workers_cannot_read_another_one_does(job, tmp_path):
    """They fail at once and ask for more: the whole corpus could become error rows in a second.

    The others decode nothing until one of them has failed: the worker that reads would be done with all.
    """
    (tmp_path / "held").touch()
    run = job([f"crawl@{tmp_path}/held {text}" for text in TEXTS], workers=3)

    def let_go(name, facts):
        if name == "document_unread":
            (tmp_path / "held").unlink(missing_ok=True)

    run.screen.on_event = let_go
    assert run.run(LacksTheMount(tmp_path, 2)) == EXIT_DONE
    assert list(run.summaries()) == [f"d{row}" for row in range(len(TEXTS))]
    assert any("cannot read a document, and rests" in note for note in run.screen.notes)
    assert set(run.column("attempts")) == {1}
    [reader] = set(run.column("worker"))
    blind = {facts["worker"] for facts in run.screen.told("document_unread")}
    assert blind
    assert reader not in blind


def write_unnoticed(path, data):
    """As a disk does it that loses its mind, or who puts back a file with its times: those and the size stay."""
    times = os.stat(path)
    written = path.with_name(f"{os.getpid()}.tmp")
    written.write_bytes(data)
    os.utime(written, ns=(times.st_atime_ns, times.st_mtime_ns))
    written.replace(path)  # at once, or somebody who reads meanwhile would see another file


@pytest.mark.slow
def test_rows_that_turn_bad_under_a_run_are_error_rows_and_nothing_else_is(job, monkeypatch):
    """Who repairs the file has them done alone."""
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.1)
    run = job(TEXTS[:9], workers=2)
    pq.write_table(pq.read_table(run.input), run.input, row_group_size=3)
    whole, texts = run.input.read_bytes(), pq.read_metadata(run.input).row_group(1).column(1)
    begin = texts.dictionary_page_offset or texts.data_page_offset
    end = begin + texts.total_compressed_size
    damaged = whole[:begin] + b"\xff" * (end - begin) + whole[end:]
    during(run, lambda: write_unnoticed(run.input, damaged))  # the rows are planned by then
    assert run.run() == EXIT_TOO_MANY_ERRORS
    kept, errors = run.summaries(), run.errors()
    assert [*errors] == ["d3", "d4", "d5"]
    assert {(row["stage"], row["retryable"], row["attempts"]) for row in errors.values()} == {("read", True, 2)}
    write_unnoticed(run.input, whole)
    assert run.run(retry_errors="retryable") == EXIT_DONE
    assert list(run.summaries()) == [f"d{row}" for row in range(9)]
    assert run.summaries().items() >= kept.items()


def answers_nothing(source, number):
    raise InputUnreachableError("503")


@needs_root
@pytest.mark.slow
def test_a_store_that_nobody_reaches_makes_no_error_rows(job, monkeypatch, tmp_path):
    """A document cannot help it: the run waits, and in the end it says so. The driver is told what S3 tells it then."""
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.1)
    monkeypatch.setattr(config, "LEAST_SILENCE_S", 1.0)
    run = job(TEXTS)

    def after_planning():
        patch.setattr(Source, "check_unchanged", answers_nothing)
        wait_for((tmp_path / "empty-0").exists, "engine")  # of this the driver's clock counts ten seconds at most

    during(run, after_planning)
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"input.parquet:11") as said:
        run.run(LacksTheMount(tmp_path, 1), stall_s=20)
    assert exit_code(said.value) == EXIT_FAILED
    assert run.screen.told("document_unread")
    assert any("cannot read a document, and rests" in note for note in run.screen.notes)
    assert not list((run.output / "_run" / "parts").glob("*"))
    assert run.run() == EXIT_DONE
    assert set(run.column("attempts")) == {1}


def test_a_store_that_is_away_when_all_is_done_ends_the_run_for_now(job, monkeypatch):
    """Exit 2 would tell a scheduler that running again changes nothing."""
    run = job(TEXTS)
    during(run, lambda: patch.setattr(Source, "check_unchanged", answers_nothing), num_done=len(TEXTS))
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"^503; finished work is kept$") as said:
        run.run()
    assert exit_code(said.value) == EXIT_FAILED
    run.screen.events.clear()
    assert run.run() == EXIT_DONE
    assert not run.screen.told("document_leased"), "nothing is decoded again"
