"""Records of a run: its status from the output folder alone, on disk or object store, and what a start leaves there."""

import json
import re
import time
from dataclasses import asdict

import pytest

from specextend.cluster.lock import LockHolder
from specextend.cluster.messages import Place, Tried
from specextend.cluster.records import (
    StartRecord,
    describe_status,
    read_status,
    tried_before,
)
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter, read_commits
from specextend.data.fingerprint import build_manifest, write_manifest
from specextend.data.storage import write_bytes
from tests.cluster.conftest import Job
from tests.data.conftest import location
from tests.properties.rows import done, failed, source_of

FIRST, SECOND, THIRD = (DocumentKey(0, row) for row in range(3))
GPU, OTHER = Place("gpu-7", "GPU 3"), Place("gpu-8", "GPU 0")


@pytest.fixture
def output(tmp_path):
    """The folder of a run of five rows that has been planned, and no more."""
    output = location(tmp_path / "out")
    write_manifest(output, build_manifest(source_of(tmp_path / "in", [5]), {}, {}))
    return output


def fail(output, error_class):
    """Commit an error row."""
    CommitWriter(output, "00000001").commit([failed(FIRST) | {"error_class": error_class}])


def write(output, path, content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    write_bytes(output.child(*path.split("/")), data)


HOLDER = asdict(LockHolder("feedbeef", "another-host", 1, 0.0))


def test_no_record_can_write_a_line_of_its_own(output):
    """Ids, hosts and classes come out of files: whoever writes those does not write the status."""
    hostile = {"host": "h\nrunning: 5 of 5\x1b[2J", "run_id": "\u202e", "heartbeat": time.time()}
    write(output, "_run/lock", HOLDER | hostile)
    fail(output, "Null\nText\x1b")
    write(output, "_run/attempts/0a.json", {"run_id": "r\n\x1b", "begin": "b\u2028", "end": "e\u0085", "exit_code": 1})
    said = re.sub(r"heartbeat \d+ s ago", "heartbeat 0 s ago", describe_status(read_status(output)))
    assert said.splitlines()[1:] == [
        r"errors: 1 Null\nText\x1b",
        r"driver: run \u202e (process 1 on h\nrunning: 5 of 5\x1b[2J), last heartbeat 0 s ago",
        r"start r\n\x1b: b\u2028 to e\x85, exit 1",
    ]


def test_the_next_start_knows_how_often_and_where_documents_were_charged(tmp_path):
    """Of each document the last count, which holds those before it, and all places.

    What ended in an error row is forgiven, and what is done is forgotten.
    """
    config = Job(tmp_path, ["x"], {}).config()
    output = location(tmp_path / "output")
    once = Tried(1, frozenset({GPU}))
    StartRecord(output, "0000000a", config).charged(dict.fromkeys((FIRST, SECOND, THIRD), once))
    StartRecord(output, "0000000b", config).charged({FIRST: Tried(2, frozenset({OTHER}))})
    CommitWriter(output, "0000000a").commit([failed(SECOND), done(THIRD)])
    assert tried_before(output, read_commits(output)) == {
        FIRST: Tried(2, frozenset({GPU, OTHER})),
        SECOND: Tried(3, frozenset({GPU}), forgiven=3),
    }
