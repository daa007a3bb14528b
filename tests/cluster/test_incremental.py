"""Nights over one growing corpus, through fake engines on a real Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.checks import prepare
from specextend.cluster.dry_run import describe_dry_run, dry_run
from specextend.cluster.exits import EXIT_DONE, Interrupt
from specextend.cluster.records import read_status
from specextend.cluster.run import run
from specextend.config import RunConfig
from specextend.data.storage import resolve
from specextend.report import build_report, write_report
from tests.cluster.conftest import Job, rows_of
from tests.cluster.fakes import FakeEngine
from tests.job.conftest import specextend


class Nights:
    """Nights of a job over one folder, each with an output of its own."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.folder = job.folder / "corpus"
        self.screen = job.screen

    def deliver(self, number: int, texts: dict[str, str]) -> None:
        """Put a file into the corpus, as a night's delivery does."""
        self.folder.mkdir(exist_ok=True)
        table = pa.table({"id": [*texts], "text": [*texts.values()]})
        pq.write_table(table, self.folder / f"{number}.parquet")

    def config(self, number: int) -> RunConfig:
        config, outputs = self._job.config(), self._job.folder / "out"
        sections = {
            "input": replace(config.input, path=str(self.folder), except_done_in=(str(outputs / "*"),)),
            "output": replace(config.output, path=str(outputs / str(number))),
        }
        return config.model_copy(update=sections)

    def run(self, number: int) -> int:
        return run(self.config(number), self.screen, Interrupt(600.0), report=write_report, factory=FakeEngine)

    def done(self, number: int) -> dict[str, dict[str, Any]]:
        return rows_of(self._job.folder / "out" / str(number) / "summaries")

    def output(self, number: int) -> Path:
        return self._job.folder / "out" / str(number)


def delivery(number: int) -> dict[str, str]:
    return {f"d{number}{row}": f"document {row} of night {number}" for row in range(10)}


@pytest.mark.slow
def test_three_nights_decode_each_text_once(job: Callable[..., Job]) -> None:
    """Ten documents arrive every night, and two of an earlier one change: what has not changed is not decoded again.

    A document that changes to a text of an earlier night is done.
    """
    nights = Nights(job([]))
    nights.deliver(1, delivery(1))
    assert nights.run(1) == EXIT_DONE
    nights.deliver(2, delivery(2) | {"again": delivery(2)["d25"]})
    assert nights.run(2) == EXIT_DONE
    nights.deliver(3, delivery(3))
    nights.deliver(1, delivery(1) | {"d13": delivery(2)["d25"], "d17": "another text"})
    planned = describe_dry_run(dry_run(prepare(nights.config(3))))
    outcomes = "19 done before and unchanged, 2 changed, 10 new"
    assert planned.startswith(f"this run is about 12 of 31 rows: {outcomes}\n12 of 12 rows to do")
    assert nights.run(3) == EXIT_DONE
    found = [set(nights.done(number)) for number in (1, 2, 3)]
    assert found == [{*delivery(1)}, {*delivery(2), "again"}, {*delivery(3), "d13", "d17"}]
    assert json.loads((nights.output(3) / "_SUCCESS").read_text()) == {"rows": 12, "done": 12, "errors": 0}
    report = build_report(str(nights.output(3)))
    assert report["selection"] == {"input": 31, "unchanged": 19, "changed": 2, "new": 10, "selected": 12}
    assert (report["rows"]["input"], report["rows"]["pending"]) == (12, 0)
    assert nights.run(4) == EXIT_DONE, "a night on which nothing has come is a good night"
    (nights.folder / "2.parquet").unlink()
    merged = nights.folder.parent / "merged.parquet"
    outputs = [str(nights.output(number)) for number in (4, 1, 3, 2)]
    ended = specextend("export", "--latest", *outputs, "--only-ids-in", str(nights.folder), "--to", str(merged))
    assert ended.stdout == f"20 documents in {merged}; 11 left out, because the input has them no more\n"
    answers = {row["doc_id"]: row["summary"] for row in pq.read_table(merged).to_pylist()}
    wanted = nights.done(1) | nights.done(3)
    assert answers == {name: row["summary"] for name, row in wanted.items()}
    assert read_status(resolve(str(nights.output(4))))["state"] == "complete"
