"""An input that is written to while a run reads it: summaries of two versions must not lie in one file."""

import os
import shutil
import signal
from dataclasses import replace

import pytest

from specextend.data.finalize import finalize
from specextend.data.inputs import InputChangedError
from specextend.data.storage import list_files
from tests.data.conftest import commit_all, opened, row_of
from tests.job.conftest import end_of, on, pausing_command, rows, start, wait_for_pause, write_corpus

__all__ = ["start"]


def write_again(path, write):
    """Another file of the same name and shape, put in place as careful writers do."""
    write("new.parquet", {"text": ["ONE", "TWO", "THREE", "FOUR"]}).replace(path)


def touch(path, write):
    """Written in place, the size as before: only the time tells."""
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def take_away(path, write):
    path.unlink()


CHANGES = [write_again, touch, take_away]


@pytest.fixture
def path(write):
    return write("in/a.parquet", {"text": ["one", "two", "three", "four"]})


@pytest.fixture
def source(path):
    return opened(path)


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_reads_on_notices(source, path, write, output, change):
    """Also a worker that has the file open, a plan that streams one too large to be read ahead, and the end of the run.

    Passthrough columns are read again then: they must belong to the texts that were summarised.
    """
    assert row_of(source, 0).text == "one"
    large = replace(source, files=(replace(source.files[0], largest_group_bytes=1 << 30),))
    scanned = large.scan()
    assert next(scanned).text == b"one"
    commit_all(source, output)
    change(path, write)
    with pytest.raises(InputChangedError, match=r"a.parquet was (modified|removed)"):
        row_of(source, 2)
    for read_on in (lambda: list(scanned), lambda: list(source.scan()), lambda: finalize(source, output)):
        with pytest.raises(InputChangedError, match="restore it and run again"):
            read_on()
    assert list_files(output.child("summaries")) == []


@pytest.mark.slow
def test_a_run_whose_input_changes_ends_in_one_line_and_resumes_with_what_was_there(start, tmp_path):
    """Nothing is given up for it: with the old file back, the same command finishes."""
    path = write_corpus(tmp_path / "in" / "a.parquet", [f"Document {row} is about dams. " * 9 for row in range(16)])
    as_it_was = tmp_path / "as it was"
    shutil.copy2(path, as_it_was)
    output = tmp_path / "out"
    arguments = on(path, output, "input.id_column=null")
    running = start(*arguments, command=pausing_command)
    wait_for_pause(running)
    write_corpus(path, ["another"] * 16)
    running.send_signal(signal.SIGCONT)
    said = end_of(running, 2)
    assert "error: a.parquet was modified (" in said
    assert "Traceback" not in said
    end_of(start(*arguments), 5)  # the file is another one
    shutil.copy2(as_it_was, path)
    end_of(start(*arguments))
    assert len(rows(output / "summaries")) == 16
