"""Records of a run: its status from the output folder alone, on disk or object store, and what a start leaves there."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.committing import RECORD_EVERY_S, Committer
from specextend.cluster.leases import Spot, Tried
from specextend.cluster.lock import STALE_S, LockHolder, OutputLock, read_lock
from specextend.cluster.records import (
    Attempt,
    describe_age,
    describe_status,
    read_charges,
    read_status,
    tried_before,
)
from specextend.core import DocumentKey
from specextend.data.audit_rows import AuditWriter
from specextend.data.fingerprint import build_manifest, fingerprint, read_manifest, write_manifest
from specextend.data.inputs import InputOptions
from specextend.data.parts import PartWriter, read_parts
from specextend.data.run_folder import Counts, lock_file, read_starts, write_success
from specextend.data.schema import error_row
from specextend.data.source import open_source
from specextend.data.storage import Location, resolve, write_bytes
from specextend.versions import code_commit
from tests.cluster.conftest import Job
from tests.properties.rows import done, failed

NUM_ROWS = 5
FIRST, SECOND, THIRD = (DocumentKey(0, row) for row in range(3))
GPU, OTHER = Spot("gpu-7", "GPU 3"), Spot("gpu-8", "GPU 0")


@pytest.fixture
def output(tmp_path: Path) -> Location:
    """The folder of a run of five rows that has been planned, and no more."""
    pq.write_table(pa.table({"text": ["a"] * NUM_ROWS}), tmp_path / "in.parquet")
    source = open_source(InputOptions(path=str(tmp_path / "in.parquet")))
    write_manifest(resolve(str(tmp_path / "out")), build_manifest(source, {}, {}))
    return resolve(str(tmp_path / "out"))


def held_by(output: Location, **fields: object) -> None:
    holder = asdict(LockHolder("feedbeef", "another-host", 1, time.time())) | fields
    write_bytes(output.child("_run", "lock"), json.dumps(holder).encode())


def fail(output: Location, classes: list[str], run_id: str = "00000001") -> None:
    """Commit error rows from the first row on."""
    PartWriter(output, run_id).commit(
        [
            error_row(DocumentKey(0, row), "d", error_class=name, message="", stage="read", retryable=False, attempts=1)
            for row, name in enumerate(classes)
        ]
    )


def first_line(output: Location) -> str:
    return describe_status(read_status(output)).splitlines()[0]


def test_a_run_whose_driver_lives_is_running(output: Location):
    """Wherever it runs: its heartbeat is in the folder."""
    held_by(output)
    said = describe_status(read_status(output)).splitlines()
    assert said[0] == "running: 0 of 5 rows done, 0 failed, 5 left"
    assert said[1].startswith("driver: run feedbeef (process 1 on another-host), last heartbeat ")


def test_a_run_whose_driver_is_gone_is_stopped_whatever_the_lock_says(output: Location):
    """Killed with -9 or with its machine: the lock stays behind."""
    held_by(output, heartbeat=time.time() - STALE_S - 1)
    assert first_line(output) == "stopped, run again to resume: 0 of 5 rows done, 0 failed, 5 left"


def test_a_driver_of_this_machine_is_known_to_be_gone_at_once(output: Location):
    """Nobody has to wait a minute for the heartbeat to age."""
    code = (
        "import sys, time; from specextend.cluster.lock import OutputLock; from specextend.data.storage import resolve"
    )
    code += "; OutputLock(resolve(sys.argv[1]), 'feedbeef').__enter__(); import os; os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, output.path], check=False).returncode == 9
    status = read_status(output)
    assert status["state"] == "stopped, run again to resume"
    assert status["heartbeat_age_s"] < STALE_S


def test_rows_are_counted_by_what_became_of_them(output: Location):
    """Which error it was decides whether to get up at night."""
    fail(output, ["NullText", "PromptTooLong", "NullText"])
    said = describe_status(read_status(output)).splitlines()
    assert said[0].endswith(": 0 of 5 rows done, 3 failed, 2 left")
    assert said[1:3] == ["errors: 2 NullText", "errors: 1 PromptTooLong"]


def test_a_finished_run_is_complete(output: Location):
    """`_SUCCESS` is written last, so it says so."""
    fail(output, ["NullText"] * NUM_ROWS)
    write_success(output, Counts(rows=NUM_ROWS, done=0, errors=NUM_ROWS))
    assert first_line(output) == "complete: 0 of 5 rows done, 5 failed, 0 left"


def write(output: Location, path: str, content: object) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    write_bytes(output.child(*path.split("/")), data)


HOLDER = asdict(LockHolder("feedbeef", "another-host", 1, 0.0))
DAMAGED = {
    "_run/lock": [b"", b"[]", HOLDER | {"heartbeat": 10**400}],
    "_run/attempts/0a.json": [b'{"run_id": "x', b"\xff", b"[" * 100_000, {"begin": 7, "exit_code": {}}],
    "_SUCCESS": [b"{", {"rows": 5}],
}


@pytest.mark.parametrize(
    ("path", "content"), [(path, content) for path, contents in DAMAGED.items() for content in contents], ids=range(9)
)
def test_a_damaged_record_hides_nothing_else(output: Location, path: str, content: object):
    """A disk was full, or somebody edited it: the rows are counted all the same, without a traceback."""
    fail(output, ["NullText"])
    write(output, "_run/attempts/0b.json", {"run_id": "0b", "begin": "2025-01-01", "end": None, "exit_code": None})
    write(output, path, content)
    said = describe_status(read_status(output)).splitlines()
    assert said[0] == "stopped, run again to resume: 0 of 5 rows done, 1 failed, 4 left"
    assert "start 0b: 2025-01-01 to no end recorded" in said


@pytest.mark.parametrize(("path", "content"), [("_run/attempts/0a.json", b"{"), ("_SUCCESS", b"")])
def test_a_damaged_record_is_named(output: Location, path: str, content: bytes):
    """Otherwise nobody learns why a start is missing, or why a finished run is not complete."""
    write(output, path, content)
    assert f"warning: {path} cannot be read" in describe_status(read_status(output))


IDENTITY: dict[str, object] = {
    "files": {"a": {"rows": "5", "size": 1, "footer_sha256": ""}},
    "hashes": {},
    "config": {},
}
MANIFESTS = [
    b"{",
    b"[" * 100_000,
    {"version": 1, "fingerprint": fingerprint(IDENTITY), "identity": IDENTITY, "config": {}},
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=range(3))
def test_a_damaged_manifest_is_said_in_one_line(tmp_path: Path, manifest: object):
    """Without it nothing is known of the run; the report says the same."""
    write(resolve(str(tmp_path)), "_run/manifest.json", manifest)
    for read in (lambda: read_status(resolve(str(tmp_path))), lambda: read_manifest(resolve(str(tmp_path)))):
        with pytest.raises(ValueError, match=r"can read \(.+\); use another") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_no_record_can_write_a_line_of_its_own(output: Location):
    """Ids, hosts and classes come out of files: whoever writes those does not write the status."""
    held_by(output, host="h\nrunning: 5 of 5\x1b[2J", run_id="\u202e")
    fail(output, ["Null\nText\x1b"])
    write(output, "_run/attempts/0a.json", {"run_id": "r\n\x1b", "begin": "b\u2028", "end": "e\u0085", "exit_code": 1})
    said = re.sub(r"heartbeat \d+ s ago", "heartbeat 0 s ago", describe_status(read_status(output)))
    assert said.splitlines()[1:] == [
        r"errors: 1 Null\nText\x1b",
        r"driver: run \u202e (process 1 on h\nrunning: 5 of 5\x1b[2J), last heartbeat 0 s ago",
        r"start r\n\x1b: b\u2028 to e\x85, exit 1",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 s ago"),
        (-30.0, "30 s in the future: its clock differs"),
        (150.0, "2 min ago"),
        (86400.0 * 400, "400 days ago"),
        (1e300, "at no time that a clock shows"),
    ],
)
def test_an_age_is_said_in_few_characters(seconds: float, said: str):
    """Clocks differ, and a lock may lie there for a year."""
    assert describe_age(seconds) == said


def test_the_next_start_knows_how_often_and_where_documents_were_charged(tmp_path: Path):
    """Of each document the last count, which holds those before it, and all places."""
    config, output = Job(tmp_path, ["x"], {}).config(), resolve(str(tmp_path / "output"))
    first = Attempt(output, "0000000a", config)
    first.charged({FIRST: Tried(1, frozenset({GPU})), SECOND: Tried(1, frozenset({GPU}))})
    Attempt(output, "0000000b", config).charged({FIRST: Tried(2, frozenset({GPU, OTHER}))})
    assert read_charges(output) == {
        FIRST: Tried(2, frozenset({GPU, OTHER})),
        SECOND: Tried(1, frozenset({GPU})),
    }


def test_what_ended_in_an_error_row_is_forgiven_and_what_is_done_is_forgotten(tmp_path: Path):
    config, output = Job(tmp_path, ["x"], {}).config(), resolve(str(tmp_path / "output"))
    charge = Tried(2, frozenset({GPU}))
    Attempt(output, "0000000a", config).charged(dict.fromkeys((FIRST, SECOND, THIRD), charge))
    PartWriter(output, "0000000a").commit([done(FIRST), failed(SECOND)])
    assert tried_before(output, read_parts(output)) == {
        SECOND: Tried(3, frozenset({GPU}), forgiven=3),
        THIRD: charge,
    }


class Puts:
    """A gate that counts writes to the folder."""

    def __init__(self) -> None:
        self.num_writes = 0

    def touch(self) -> None:
        pass

    def check(self) -> None:
        self.num_writes += 1


def test_what_happens_to_workers_is_written_no_more_often_than_a_heartbeat(tmp_path: Path):
    """A thousand workers come up in a minute, and on an object store each write is a request that costs money."""
    output, gate = resolve(str(tmp_path / "output")), Puts()
    config = Job(tmp_path, ["x"], {}).config()
    with OutputLock(output, "0000000a") as lock:
        attempt = Attempt(output.behind(gate), "0000000a", config)
        attempt.begin()
        each = gate.num_writes
        committer = Committer(
            output,
            PartWriter(output, "0000000a"),
            AuditWriter(output, "0000000a"),
            lock,
            64,
            30.0,
        )
        for tenth in range(1000):
            attempt.worker_asked(f"worker-{tenth}", tenth)
            committer.record_if_due(attempt, tenth / 10)
        assert gate.num_writes <= each * (1 + 1000 / 10 / RECORD_EVERY_S)
        written = gate.num_writes
        committer.record_if_due(attempt, 1000.0)
        committer.record_if_due(attempt, 2000.0)
        assert gate.num_writes == written + each, "and not at all if nothing has happened"
    assert len(read_starts(output)[0].workers or ()) == 1000


def test_a_start_that_takes_a_dead_drivers_lock_over_keeps_its_last_heartbeat(tmp_path: Path):
    """The dead one wrote no end, and its lock is the only place that knows how long it lived."""
    output, now = resolve(str(tmp_path / "output")), time.time()
    held_by(output, run_id="0000000a", host=socket.gethostname(), pid=2**22 + 1, heartbeat=now - 5)
    dead = read_lock(output)
    write_bytes(lock_file(output), json.dumps(asdict(dead) | {"pid_namespace": own_namespace(tmp_path)}).encode())
    with OutputLock(output, "0000000b") as lock:
        assert lock.predecessor is not None
        Attempt(output, "0000000b", Job(tmp_path, ["x"], {}).config(), took_over=lock.predecessor).begin()
    [start] = read_starts(output)
    assert start.took_over == ("0000000a", pytest.approx(now - 5))


def own_namespace(folder: Path) -> str:
    """What a lock of this process says of its boot and processes."""
    with OutputLock(resolve(str(folder / "another")), "0000000c"):
        holder = read_lock(resolve(str(folder / "another")))
    assert holder is not None
    return holder.pid_namespace


def test_the_code_of_a_working_copy_has_a_commit():
    """Of the repository that this test runs in, unless it was exported without its history."""
    root = Path(__file__).parents[2]
    asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if not (root / ".git").exists() or asked.returncode:
        pytest.skip("this is no working copy of a git repository")
    assert (code_commit() or "").removesuffix("-dirty") == asked.stdout.strip()
