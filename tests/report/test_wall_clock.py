"""What is said of a run's time if its records hold less than they might."""

import json
import random
from pathlib import Path

import pytest

from specextend.cluster.records import StartRecord
from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from specextend.report import build_report
from tests.report.made_up import FIRST, NIGHT_S, SECOND, SetClock, config_of, info, rows_of_worker


def one_worker(folder, workers=True):
    """A driver that was killed 100 s after it began, when its only worker had finished a few documents."""
    output = resolve(str(folder))
    clock = SetClock()
    record = StartRecord(output, FIRST, config_of(str(folder)), clock=clock)
    record.write()
    if workers:
        record.worker_asked("worker-1", 1)
        record.note("worker-1", "begun")
        clock.now = NIGHT_S + 10
        record.note("worker-1", "ready", **info(1)._asdict())
        record.write()
    CommitWriter(output, FIRST).commit(rows_of_worker(range(5), "host:1", NIGHT_S + 11, random.Random(1)))
    return str(folder)


def last_end(report):
    return report["timeline"][0]["workers"][0]["spans"][-1][1]


def test_the_last_sign_of_life_stands_for_an_end_that_nobody_wrote(tmp_path):
    """Killed with its machine: the lock still holds its heartbeat; without a lock, the last row says the most.

    So it does where the next start holds the lock while the report is made.
    """
    run = one_worker(tmp_path)
    lock = Path(run, "_run", "lock")
    report = build_report(run)
    before = report["starts"][0]["seconds"]
    assert before == pytest.approx(last_end(report), abs=1e-3)
    lock.write_text(json.dumps({"run_id": SECOND, "heartbeat": NIGHT_S + 5000, "host": "h", "pid": 1}))
    assert build_report(run)["starts"][0]["seconds"] == before
    lock.write_text(json.dumps({"run_id": FIRST, "heartbeat": NIGHT_S + 100, "host": "h", "pid": 1}))
    report = build_report(run)
    [start] = report["starts"]
    assert start["end"] is None
    assert start["seconds"] == 100.0
    assert start["last_sign"] == "2027-01-15T08:01:40.000+00:00"
    assert not report["wall_clock"]["is_exact"]
    assert start["paid_s"]["lost"] == pytest.approx(100 - last_end(report), abs=1e-3)


def test_a_worker_that_was_never_recorded_counts_what_its_rows_say(tmp_path):
    """The driver was killed before it wrote that the worker is ready: its documents were not for nothing."""
    report = build_report(one_worker(tmp_path, workers=False))
    paid = report["wall_clock"]["paid_s"]
    assert sum(paid.values()) == pytest.approx(report["time"]["busy_s"])
    [worker] = report["timeline"][0]["workers"]
    assert worker["worker"] == "host:1"
    assert worker["seat"] is None
    assert worker["documents"] == 5
