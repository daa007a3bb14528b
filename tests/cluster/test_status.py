"""A run's state from its output folder alone, on a disk or an object store: no Ray, no configuration."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.lock import STALE_S, Holder
from specextend.cluster.status import describe_status, read_status
from specextend.core import DocumentKey
from specextend.data.documents import InputOptions, open_source
from specextend.data.finalize import Counts, write_success
from specextend.data.fingerprint import build_manifest, write_manifest
from specextend.data.parts import PartWriter
from specextend.data.schema import error_row
from specextend.data.storage import Location, resolve, write_bytes
from tests.data.s3_server import Endpoint, s3_server

NUM_ROWS = 5


@pytest.fixture(scope="module")
def server() -> Iterator[Endpoint]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(params=["disk", "s3"])
def output(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Location:
    """The folder of a run of five rows that has been planned, and no more."""
    uri = str(tmp_path / "out")
    if request.param == "s3":
        endpoint = request.getfixturevalue("server")
        for name, value in endpoint.environment.items():
            monkeypatch.setenv(name, value)
        endpoint.empty()
        uri = "s3://corpus/runs/one night"
    pq.write_table(pa.table({"text": ["a"] * NUM_ROWS}), tmp_path / "in.parquet")
    source = open_source(InputOptions(path=str(tmp_path / "in.parquet")))
    write_manifest(resolve(uri), build_manifest(source, {}, {}))
    return resolve(uri)


def held_by(output: Location, **fields: object) -> None:
    holder = asdict(Holder("feedbeef", "another-host", 1, time.time())) | fields
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
    uri = output.path if output.is_local else f"s3://{output.path}"
    assert subprocess.run([sys.executable, "-c", code, uri], check=False).returncode == 9
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
