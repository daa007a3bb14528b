"""The end of a run, after the last commit: summaries, report, `_SUCCESS`. Nothing is left to decode: no Ray starts."""

import json
import shutil
from contextlib import suppress
from functools import reduce
from operator import getitem

import pytest

from specextend.cluster.checks import check_run
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_LOCKED,
    EXIT_OTHER_RUN,
    OtherRunError,
    OutputError,
    RunError,
    exit_code,
)
from specextend.cluster.lock import OutputLock
from specextend.cluster.records import describe_status, read_status
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.fingerprint import fingerprint, write_manifest
from specextend.report import write_report
from tests.cluster.conftest import Job
from tests.cluster.fakes import NeverLoads
from tests.data.conftest import location
from tests.job.conftest import kept_handlers, read_json
from tests.properties.rows import done, failed
from tests.refused import refused

KEYS = [DocumentKey(0, row) for row in range(6)]


class Ended(Job):
    """A run whose rows are all committed, and which has not been finalized."""

    def begin(self):
        prepared = check_run(self.config())
        self.fingerprint = prepared.manifest["fingerprint"]
        write_manifest(prepared.output, prepared.manifest)
        self.commit([failed(KEYS[0]), *map(done, KEYS[1:])], self.fingerprint)

    def commit(self, rows, fingerprint):
        CommitWriter(location(self.output), "0000000a", fingerprint).commit(rows)

    def end(self, report=write_report):
        return self.run(NeverLoads(), report=report)

    @property
    def lock(self):
        return self.output / "_run" / "lock"

    @property
    def success(self):
        return self.output / "_SUCCESS"


@pytest.fixture
def ended(tmp_path):
    ended = Ended(tmp_path, ["x"] * len(KEYS), {"max_error_fraction": 1.0})
    with kept_handlers():
        ended.begin()
        yield ended


def steal(ended):
    ended.lock.write_text(json.dumps(read_json(ended.lock) | {"run_id": "feedbeef", "pid": 1}))


def remove(ended):
    ended.lock.unlink()


@pytest.mark.parametrize("happens, code", [(steal, EXIT_LOCKED), (remove, EXIT_FAILED)])
def test_a_driver_that_lost_its_lock_does_not_say_that_the_run_is_complete(ended, happens, code):
    """Its successor is at work in the folder: `_SUCCESS` beside half of its summaries would be believed."""
    with pytest.raises(RunError) as said:
        ended.end(report=lambda *arguments, **options: happens(ended))
    assert exit_code(said.value) == code
    assert not ended.success.exists()


def test_a_run_that_waited_for_another_one_reads_the_folder_again(ended, tmp_path):
    """It had looked before it waited, and told its user to move the other run's good commits away."""
    assert ended.end() == EXIT_DONE
    shutil.move(ended.output, tmp_path / "done")
    other = OutputLock(location(ended.output), "0000000a", host="elsewhere")
    assert other.try_take()

    def end(name, facts):
        if not ended.success.exists() and "is held by run 0000000a" in ended.screen.notes[-1]:
            shutil.copytree(tmp_path / "done", ended.output, dirs_exist_ok=True)
            other.release()

    ended.screen.on_event = end
    ended.sections = {"prompt": {"instruction": "Answer: {{ document }}"}}
    with pytest.raises(OtherRunError, match="belongs to another run"):
        ended.end()


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"rows": "6", "done": 5, "errors": 1}'])
def test_a_success_file_that_says_nothing_is_written_again(ended, content):
    """An empty one, of a tool that touches it or of a full disk, was a traceback, also in `status`."""
    assert ended.end() == EXIT_DONE
    whole = ended.success.read_bytes()
    ended.success.write_bytes(content)
    status = read_status(location(ended.output))
    assert status["state"] == "stopped, run again to resume"
    assert status["warnings"] == ["_SUCCESS cannot be read; run again to restore it"]
    assert ended.end() == EXIT_DONE
    assert ended.success.read_bytes() == whole


def test_success_is_the_last_file_that_is_written(ended):
    """It stood beside exit 1 where the record of the start could not be written after it."""

    def take_the_records_place(*arguments, **options):
        [record] = (ended.output / "_run" / "attempts").iterdir()
        record.unlink()
        (record / "in the way").mkdir(parents=True)

    with pytest.raises(OutputError, match="cannot be written to") as said:
        ended.end(report=take_the_records_place)
    assert exit_code(said.value) == EXIT_FAILED
    assert not ended.success.exists()


def test_a_start_that_finds_everything_done_removes_what_a_killed_one_left(ended):
    """Half a record lay there for good: the driver had been killed after `_SUCCESS`."""
    assert ended.end() == EXIT_DONE
    folders = ["", "_run", "_run/attempts", "_run/parts", "summaries", "errors"]
    left = [ended.output / folder / ".x.0badf00d.tmp" for folder in folders]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert ended.end() == EXIT_DONE
    assert ended.screen.notes[-1].startswith("complete already")
    assert not [path for path in left if path.exists()]


@pytest.mark.parametrize(
    "name, value",
    [("identity.files", ["0.parquet"]), ("config.target", "tiny"), ("config.output.column", 5), ("selection", "all")],
)
def test_a_manifest_of_another_shape_is_damaged_and_no_traceback(ended, name, value):
    """Somebody edited it, or a disk lost its mind: JSON that parses is not yet a manifest."""
    path = ended.output / "_run" / "manifest.json"
    manifest = read_json(path)
    *above, last = name.split(".")
    reduce(getitem, above, manifest)[last] = value
    with suppress(TypeError, ValueError):
        manifest["fingerprint"] = fingerprint(manifest["identity"])
    path.write_text(json.dumps(manifest))
    with pytest.raises(OtherRunError, match=r"manifest.json is damaged, .*; use another output folder") as said:
        ended.end()
    assert exit_code(said.value) == EXIT_OTHER_RUN
    assert "manifest.json is damaged, " in refused(write_report, str(ended.output))


START = '{"run_id": "0000000b", "begin": "2026-01-01", '
WORKER = '"worker": "w", "seat": 1, "asked": "2026-01-01", "begun": null, "ready": null, "gone": null, "reason": null'
RECORDS = {
    "empty": "",
    "deep": "[" * 100_000,
    "half a worker": START + '"workers": [{"worker": "worker-1"}], "seen": "2026-01-01"}',
    "infinity": START + '"charges": {"0:0": {"attempts": 1e999, "struck": []}}}',
    "half a kernel": f'{START}"workers": [{{{WORKER}, "kernels": [{{}}]}}], "seen": "2026-01-01"}}',
    "number": START + '"took_over": {"run_id": 5}}',
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_that_is_damaged_or_of_another_shape_stops_neither_a_run_nor_its_report(ended, record):
    """A driver was killed on a full disk: what it did is in the parts, and its record says nothing that a run needs.

    Nor does it hide anything else of the status.
    """
    path = ended.output / "_run" / "attempts" / "0000000b.json"
    path.parent.mkdir()
    path.write_text(record)
    ended.lock.write_bytes(b"")
    state, *said = describe_status(read_status(location(ended.output))).splitlines()
    assert state == "stopped, run again to resume: 5 of 6 rows done, 1 failed, 0 left"
    assert "warning: _run/lock cannot be read; if no driver is running, delete it" in said
    assert any(
        line.startswith(("start 0000000b: 20", "warning: _run/attempts/0000000b.json cannot be")) for line in said
    )
    ended.lock.unlink()
    assert ended.end() == EXIT_DONE
    report = write_report(str(ended.output))
    assert report["rows"]["done"] == 5
    assert "0000000b" in [start["run_id"] for start in report["starts"]]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_part_of_another_run_is_refused(ended, has_manifest):
    """Somebody copied it there; its rows would have passed for ours, also where the manifest had been taken away."""
    ended.commit([done(DocumentKey(0, 0), "a stranger's")], "f00d" * 16)
    if not has_manifest:
        (ended.output / "_run" / "manifest.json").unlink()
    which = f"fingerprint f00df00df00d, here {ended.fingerprint[:12]}"
    with pytest.raises(
        OtherRunError, match=rf"part-0000000a-000001.parquet is a commit of another run \({which}\); move it away$"
    ) as said:
        ended.end()
    assert exit_code(said.value) == EXIT_OTHER_RUN
    assert not ended.success.exists()
