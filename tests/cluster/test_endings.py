"""The end of a run, after the last commit: summaries, report, `_SUCCESS`. Nothing is left to decode: no Ray starts."""

import json
from contextlib import suppress

import pytest

from specextend.cluster.checks import check_run
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_LOCKED,
    EXIT_OTHER_RUN,
    Interrupt,
    OtherRunError,
    OutputError,
    RunError,
    exit_code,
)
from specextend.cluster.lifecycle import run_job
from specextend.cluster.records import read_status
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.fingerprint import fingerprint, write_manifest
from specextend.report import write_report
from tests.cluster.conftest import MODELS, Screen
from tests.cluster.fakes import NeverLoads
from tests.data.conftest import location
from tests.job.conftest import kept_handlers, read_json
from tests.properties.rows import done, failed, source_of

NUM_ROWS = 3


class Ended:
    """A run of two files whose rows are all committed, and which has not been finalized."""

    def __init__(self, folder):
        source_of(folder / "in", [NUM_ROWS] * 2)
        self.output, self.screen = folder / "output", Screen()
        prepared = check_run(self.config())
        self.fingerprint = prepared.manifest["fingerprint"]
        write_manifest(prepared.output, prepared.manifest)
        keys = [DocumentKey(file, row) for file in range(2) for row in range(NUM_ROWS)]
        self.commit([done(key) for key in keys[1:]] + [failed(keys[0])], self.fingerprint)

    def commit(self, rows, fingerprint):
        CommitWriter(location(self.output), "0000000a", fingerprint).commit(rows)

    def config(self):
        return RunConfig.from_values(
            {
                "input": {"path": str(self.output.parent / "in")},
                "output": {"path": str(self.output)},
                "target": {"model": str(MODELS / "target"), "dtype": "float32"},
                "decoding": {"mode": "autoregressive", "max_new_tokens": 5},
                "job": {"max_error_fraction": 1.0},
            }
        )

    def run(self, report=write_report):
        interrupt = Interrupt(600.0)
        try:
            return run_job(self.config(), self.screen, interrupt, report=report, factory=NeverLoads())
        finally:
            interrupt.disarm()

    @property
    def lock(self):
        return self.output / "_run" / "lock"

    def is_complete(self):
        return (self.output / "_SUCCESS").exists()


@pytest.fixture
def ended(tmp_path):
    with kept_handlers():
        yield Ended(tmp_path)


def steal(ended):
    ended.lock.write_text(json.dumps(read_json(ended.lock) | {"run_id": "feedbeef", "pid": 1}))


def remove(ended):
    ended.lock.unlink()


@pytest.mark.parametrize("happens, code", [(steal, EXIT_LOCKED), (remove, EXIT_FAILED)])
def test_a_driver_that_lost_its_lock_does_not_say_that_the_run_is_complete(ended, happens, code):
    """Its successor is at work in the folder: `_SUCCESS` beside half of its summaries would be believed."""
    with pytest.raises(RunError) as said:
        ended.run(report=lambda *arguments, **options: happens(ended))
    assert exit_code(said.value) == code
    assert not ended.is_complete()


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"rows": "6", "done": 5, "errors": 1}'])
def test_a_success_file_that_says_nothing_is_written_again(ended, content):
    """An empty one, of a tool that touches it or of a full disk, was a traceback, also in `status`."""
    assert ended.run() == EXIT_DONE
    whole = (ended.output / "_SUCCESS").read_bytes()
    (ended.output / "_SUCCESS").write_bytes(content)
    assert read_status(location(ended.output))["state"] == "stopped, run again to resume"
    assert ended.run() == EXIT_DONE
    assert (ended.output / "_SUCCESS").read_bytes() == whole


def test_success_is_the_last_file_that_is_written(ended):
    """It stood beside exit 1 where the record of the start could not be written after it."""

    def take_the_records_place(*arguments, **options):
        [record] = (ended.output / "_run" / "attempts").iterdir()
        record.unlink()
        (record / "in the way").mkdir(parents=True)

    with pytest.raises(OutputError, match="cannot be written to") as said:
        ended.run(report=take_the_records_place)
    assert exit_code(said.value) == EXIT_FAILED
    assert not ended.is_complete()


def test_a_start_that_finds_everything_done_removes_what_a_killed_one_left(ended):
    """Half a record lay there for good: the driver had been killed after `_SUCCESS`."""
    assert ended.run() == EXIT_DONE
    folders = ["", "_run", "_run/attempts", "_run/parts", "summaries", "errors"]
    left = [ended.output / folder / ".x.0badf00d.tmp" for folder in folders]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert ended.run() == EXIT_DONE
    assert ended.screen.notes[-1].startswith("complete already")
    assert not [path for path in left if path.exists()]


def edited(manifest, *path, to):
    """A manifest in which a value is another one, and the fingerprint right."""
    part = manifest
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = to
    with suppress(TypeError, ValueError):
        manifest["fingerprint"] = fingerprint(manifest["identity"])
    return manifest


SHAPES = {
    "files as a list": lambda manifest: edited(manifest, "identity", "files", to=["0.parquet"]),
    "a section as text": lambda manifest: edited(manifest, "config", "target", to="tiny"),
    "a value that is another one": lambda manifest: edited(manifest, "config", "output", "column", to=5),
    "a selection as text": lambda manifest: edited(manifest, "selection", to="all"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_manifest_of_another_shape_is_damaged_and_no_traceback(ended, shape):
    """Somebody edited it, or a disk lost its mind: JSON that parses is not yet a manifest."""
    path = ended.output / "_run" / "manifest.json"
    path.write_text(json.dumps(SHAPES[shape](read_json(path))))
    with pytest.raises(OtherRunError, match=r"manifest.json is damaged, .*; use another output folder") as said:
        ended.run()
    assert exit_code(said.value) == EXIT_OTHER_RUN
    with pytest.raises(ValueError, match=r"manifest.json is damaged, ") as shown:
        write_report(str(ended.output))
    assert "\n" not in f"{said.value}{shown.value}"


WORKER = dict.fromkeys(("begun", "ready", "gone", "reason")) | {"worker": "worker-1", "seat": 1, "asked": "2026-01-01"}
RECORDS = [
    b"",
    b"[" * 100_000,
    {"workers": [{"worker": "worker-1"}], "seen": "2026-01-01"},
    {"charges": {"0:0": {"attempts": 1e999, "struck": []}}},
    {"workers": [WORKER | {"kernels": [{}]}], "seen": "2026-01-01"},
    {"took_over": {"run_id": 5}},
]


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_a_record_that_is_damaged_or_of_another_shape_stops_neither_a_run_nor_its_report(ended, record):
    """A driver was killed on a full disk: what it did is in the parts, and its record says nothing that a run needs."""
    path = ended.output / "_run" / "attempts" / "0000000b.json"
    path.parent.mkdir()
    start = {"run_id": "0000000b", "begin": "2026-01-01"}
    path.write_bytes(record if isinstance(record, bytes) else json.dumps(start | record).encode())
    assert ended.run() == EXIT_DONE
    report = write_report(str(ended.output))
    assert report["rows"]["done"] == 2 * NUM_ROWS - 1
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
        ended.run()
    assert exit_code(said.value) == EXIT_OTHER_RUN
    assert not ended.is_complete()
