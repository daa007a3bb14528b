"""What is away is not damaged: who obeys "move it away" must not lose good work."""

import json
import math
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow.parquet as pq
import pytest

from specextend.cluster.driver import is_damaged_row
from specextend.cluster.exits import EXIT_DONE, EXIT_FAILED, exit_code_of_command
from specextend.core import DocumentKey
from specextend.data.commits import DamagedCommitError, read_commits
from specextend.data.finalize import finalize
from specextend.data.fingerprint import build_manifest, read_manifest, write_manifest
from specextend.data.run_folder import (
    Counts,
    read_audit,
    read_starts,
    read_success,
    starts_folder,
    write_audit,
    write_success,
)
from specextend.data.storage import read_again, write_bytes
from specextend.documents.file_readers import SourceFile, read_files
from specextend.documents.text import DocumentOptions
from specextend.report.export import Form, export_answers
from tests.damage import DAMAGES, damage
from tests.data.conftest import commit_all, input_error, location, opened, row_of
from tests.data.faulty_store import FAULTS, FaultyStore

TEXTS = ["one", "two", "three"]


@pytest.fixture
def run(tmp_path, write):
    """A finished run and its input."""
    write("in/a.parquet", {"text": TEXTS})
    source = opened(tmp_path / "in")
    output = location(tmp_path / "out")
    write_manifest(output, build_manifest(source, {}, {}))
    commit_all(source, output)
    write_audit(output, {"documents": 1})
    write_bytes(starts_folder(output).child("0000000a.json"), json.dumps({"run_id": "0000000a"}).encode())
    finalize(source, output)
    write_success(output, Counts(3, 3, 0))
    return source


@pytest.fixture
def store():
    return FaultyStore()


READERS = {
    "commits": lambda source, output: read_commits(output),
    "an audit": lambda source, output: read_audit(output),
    "manifest": lambda source, output: read_manifest(output),
    "a start": lambda source, output: read_starts(output),
    "_SUCCESS": lambda source, output: read_success(output),
    "summaries": lambda source, output: export_answers([output], output.parent.child("to"), Form("parquet")),
    "a row of the input": lambda source, output: row_of(source, 1),
    "the input": lambda source, output: [row.text for row in source.scan()],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_what_cannot_be_read_for_now_is_not_called_damaged(tmp_path, run, store, reader, fault):
    """A passing EIO, or an empty body with status 200, said "damaged; delete it", and exit 2: do not run again."""

    def read():
        source = replace(run, root=store.at(run.root.path))  # without the rows that it keeps
        for left in (tmp_path / "to").glob("*"):
            left.unlink()
        return READERS[reader](source, store.at(tmp_path / "out"))

    expected = read()
    store.fault = FAULTS[fault]
    passing = [EXIT_DONE, EXIT_FAILED]
    codes = {1.0: passing, 2.0: passing, 3.0: passing, math.inf: [EXIT_FAILED], 0.0: [EXIT_DONE]}
    for store.num_faults, possible in codes.items():
        code = EXIT_DONE
        try:
            assert read() == expected
        except (OSError, ValueError) as error:
            code = exit_code_of_command(error)
        assert code in possible


@pytest.mark.parametrize("fault", FAULTS)
def test_an_input_whose_store_fails_is_out_of_reach_from_the_footers_to_the_last_row(
    tmp_path, run, store, monkeypatch, fault
):
    """Exit 2 and "repair it or take it out" was said of a good file; nor may its rows become error rows."""
    monkeypatch.setattr("specextend.data.listing.resolve", lambda path: store.at(path))
    store.fault = FAULTS[fault]
    store.num_faults = math.inf
    with input_error(r"^a.parquet cannot be reached \(.*\); run again$") as said:
        opened(tmp_path / "in")
    assert exit_code_of_command(said.value) == EXIT_FAILED
    assert not is_damaged_row(replace(run, root=store.at(run.root.path)), DocumentKey(0, 1))


def test_a_byte_that_came_is_not_called_missing_whichever_it_is(tmp_path):
    """One damaged file in 256 was "out of reach", and then another: the reader's own mark was what it held."""
    for byte in range(256):
        (tmp_path / "a").write_bytes(bytes([byte]))
        with pytest.raises(ValueError, match="no record"):
            read_again(location(tmp_path / "a"), refuse)


def refuse(file):
    """What a parser does with a damaged file."""
    raise ValueError(f"no record: {file.read()!r}")


@pytest.mark.parametrize("fault", ["EIO", "nothing", "a half"])
def test_a_document_of_which_not_all_bytes_come_is_unreachable(tmp_path, store, fault):
    """Half of it would be a document like any other."""
    contents = {"text": "some text", "jsonl": '{"text": "some text"}\n' * 2}
    files = []
    for kind, content in contents.items():
        (tmp_path / kind).write_text(content)
        files.append(SourceFile(store.at(tmp_path / kind), kind, kind, kind, len(content), datetime.now(UTC)))
    store.fault = FAULTS[fault]
    for store.num_faults, texts, reasons in ((1, 3, []), (math.inf, 0, ["unreachable"] * 2)):
        read = []
        failures = []
        for reading in read_files(files, location(tmp_path), DocumentOptions(workers=1)):
            failures += reading.failures
            read += pq.read_table(tmp_path / reading.pending).to_pylist() if reading.pending else reading.rows
        assert [row["text"] for row in read] == ["some text"] * texts
        assert [failure.reason for failure in failures] == reasons


@pytest.mark.parametrize("where", DAMAGES)
def test_a_commit_that_is_there_and_does_not_parse_is_damaged_and_nobody_is_told_to_delete_it(
    tmp_path, run, store, where
):
    """Somebody may yet repair it: what is done is moved away."""
    [commit] = (tmp_path / "out" / "_run" / "parts").iterdir()
    damage(commit, where)
    with pytest.raises(DamagedCommitError, match=rf"{commit.name} is damaged \(.*\); move it away to do ") as said:
        read_commits(store.at(tmp_path / "out"))
    assert "delete" not in str(said.value)
