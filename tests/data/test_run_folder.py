"""Records of starts: written by drivers that were killed at any moment, read by whoever wants to know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specextend.cluster.records import version_changes
from specextend.data.run_folder import read_starts
from specextend.data.storage import Location, resolve
from specextend.versions import library_versions


@pytest.fixture
def output(tmp_path: Path) -> Location:
    (tmp_path / "_run" / "attempts").mkdir(parents=True)
    return resolve(str(tmp_path))


def record(output: Location, name: str, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    Path(output.path, "_run", "attempts", f"{name}.json").write_text(text)


def test_starts_are_listed_oldest_first_and_damaged_records_last(output: Location):
    """The last one decides what is said of the run, so a damaged one must not be it."""
    record(output, "a", {"run_id": "a", "begin": "2025-01-02", "exit_code": 75})
    record(output, "b", {"run_id": "b", "begin": "2025-01-01", "versions": {"torch": "2"}})
    record(output, "c", "{")
    first, second, third = read_starts(output)
    assert (first.run_id, first.versions, second.run_id, second.exit_code) == ("b", {"torch": "2"}, "a", 75)
    assert third.run_id == "c"
    assert third.damage is not None


def test_a_damaged_record_does_not_stop_the_next_start(output: Location):
    """It compares its libraries with those of the last start whose record can be read."""
    assert version_changes(output) == []
    record(output, "a", {"begin": "2025-01-01", "versions": library_versions() | {"torch": "0.1"}})
    record(output, "b", "[]")
    assert version_changes(output) == [f"torch was 0.1 and is {library_versions()['torch']}"]
