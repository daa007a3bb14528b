from __future__ import annotations

import json
from pathlib import Path

from specextend.cluster.attempts import Attempt, read_charges
from specextend.cluster.leases import Tried
from specextend.cluster.places import Spot
from specextend.cluster.run import tried_before
from specextend.core import DocumentKey
from specextend.data.parts import PartWriter, read_parts
from specextend.data.storage import resolve
from tests.cluster.conftest import Job
from tests.properties.rows import done, failed

FIRST, SECOND, THIRD = (DocumentKey(0, row) for row in range(3))
GPU, OTHER = Spot("gpu-7", "GPU 3"), Spot("gpu-8", "GPU 0")


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


def test_a_record_of_an_older_version_says_nothing_of_charges(tmp_path: Path):
    """A run may be resumed after an update."""
    folder = tmp_path / "output" / "_run" / "attempts"
    folder.mkdir(parents=True)
    (folder / "0000000a.json").write_text(json.dumps({"begin": "2026-01-01"}))
    assert read_charges(resolve(str(tmp_path / "output"))) == {}


def test_what_ended_in_an_error_row_is_forgiven_and_what_is_done_is_forgotten(tmp_path: Path):
    config, output = Job(tmp_path, ["x"], {}).config(), resolve(str(tmp_path / "output"))
    charge = Tried(2, frozenset({GPU}))
    Attempt(output, "0000000a", config).charged(dict.fromkeys((FIRST, SECOND, THIRD), charge))
    PartWriter(output, "0000000a").commit([done(FIRST), failed(SECOND)])
    assert tried_before(output, read_parts(output)) == {
        SECOND: Tried(3, frozenset({GPU}), forgiven=3),
        THIRD: charge,
    }
