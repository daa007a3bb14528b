"""What is said of a run's time if its records hold less than they might."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specextend.cluster.records import Attempt
from specextend.data.parts import PartWriter
from specextend.data.storage import resolve
from specextend.report import build_report, render
from specextend.report.wall_clock import KINDS
from tests.report.made_up import FIRST, NIGHT_S, SECOND, SetClock, config_of, info, rows_of_worker, write_run


def record(run: str, run_id: str) -> Path:
    return Path(run, "_run", "attempts", f"{run_id}.json")


def rewritten(path: Path, **values: Any) -> None:
    """Change a record; a value of None takes the entry away."""
    kept = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))


def one_worker(folder: Path, workers: bool = True) -> str:
    """A driver that was killed 100 s after it began, when its only worker had finished a few documents."""
    output, clock = resolve(str(folder)), SetClock()
    attempt = Attempt(output, FIRST, config_of(str(folder)), clock=clock)
    attempt.begin()
    if workers:
        attempt.worker_asked("worker-1", 1)
        attempt.worker_begun("worker-1")
        clock.now = NIGHT_S + 10
        attempt.worker_ready("worker-1", info(1))
        attempt.write()
    PartWriter(output, FIRST).commit(rows_of_worker(range(5), "host:1", NIGHT_S + 11, random.Random(1)))
    return str(folder)


def last_end(report: dict[str, Any]) -> float:
    return report["timeline"][0]["workers"][0]["spans"][-1][1]


def test_the_last_sign_of_life_stands_for_an_end_that_nobody_wrote(tmp_path: Path):
    """Killed with its machine: the lock still holds its heartbeat; without a lock, the last row says the most."""
    run = one_worker(tmp_path)
    report = build_report(run)
    assert report["starts"][0]["seconds"] == pytest.approx(last_end(report), abs=1e-3)
    lock = Path(run, "_run", "lock")
    lock.write_text(json.dumps({"run_id": FIRST, "heartbeat": NIGHT_S + 100, "host": "h", "pid": 1}))
    report = build_report(run)
    [start] = report["starts"]
    assert (start["end"], start["seconds"], start["last_sign"]) == (None, 100.0, "2027-01-15T08:01:40.000+00:00")
    assert not report["wall_clock"]["is_exact"]
    assert start["paid_s"]["lost"] == pytest.approx(100 - last_end(report), abs=1e-3)
    assert "(last sign of life)" in render(report, width=200)


def test_the_heartbeat_of_another_driver_says_nothing(tmp_path: Path):
    """The next start holds the lock while the report is made."""
    run = one_worker(tmp_path)
    before = build_report(run)["starts"][0]["seconds"]
    lock = {"run_id": SECOND, "heartbeat": NIGHT_S + 5000, "host": "h", "pid": 1}
    Path(run, "_run", "lock").write_text(json.dumps(lock))
    assert build_report(run)["starts"][0]["seconds"] == before


def test_a_worker_that_was_never_recorded_counts_what_its_rows_say(tmp_path: Path):
    """The driver was killed before it wrote that the worker is ready: its documents were not for nothing."""
    report = build_report(one_worker(tmp_path, workers=False))
    paid = report["wall_clock"]["paid_s"]
    assert sum(paid.values()) == pytest.approx(report["time"]["busy_s"])
    [worker] = report["timeline"][0]["workers"]
    assert (worker["worker"], worker["seat"], worker["documents"]) == ("host:1", None, 5)


def test_a_run_of_an_older_version_has_its_rates_and_nothing_of_its_workers(tmp_path: Path):
    """Their hours were not recorded: a guess would be taken for a figure."""
    run = write_run(tmp_path / "run", price_per_worker_hour=1.0)
    for run_id in (FIRST, SECOND):
        rewritten(record(run, run_id), seen=None, report=None, workers=[{"host": "host", "pid": 1}])
    report = build_report(run)
    clock = report["wall_clock"]
    unknown = ("worker_hours", "gpu_hours", "paid_s", "shares", "cost")
    assert {name: clock[name] for name in unknown} == dict.fromkeys(unknown)
    assert clock["documents_per_hour"] is not None
    assert all(start["workers"] is None for start in report["starts"])
    assert "worker hours" not in render(report, width=90).split("Starts")[0]


def test_one_start_of_an_older_version_leaves_the_hours_of_the_others(tmp_path: Path):
    """The program was updated between two nights: the sum is not known, the second night is."""
    run = write_run(tmp_path / "run")
    rewritten(record(run, FIRST), seen=None)
    report = build_report(run)
    assert report["wall_clock"]["worker_hours"] is None
    assert [start["worker_hours"] is None for start in report["starts"]] == [True, False]


def test_summaries_alone_have_no_wall_clock(tmp_path: Path):
    """Somebody copied the texts and nothing else."""
    run = write_run(tmp_path / "run")
    clock = build_report(str(copy_of_summaries(run, tmp_path / "copy")))["wall_clock"]
    assert clock == dict.fromkeys(clock) | {"is_exact": False}


def copy_of_summaries(run: str, folder: Path) -> Path:
    """The summaries of a version that had fewer columns."""
    first = sorted(Path(run, "_run", "parts").glob("*.parquet"))[0]
    (folder / "summaries").mkdir(parents=True)
    columns = ["file", "row", "started_at", "num_memory_retries"]
    pq.write_table(pq.read_table(first).drop_columns(columns), folder / "summaries" / "part-00000.parquet")
    return folder


def test_rows_without_a_beginning_have_no_time_line(tmp_path: Path):
    """An older version did the documents; the hours of workers are known all the same."""
    run = one_worker(tmp_path)
    for path in Path(run, "_run", "parts").iterdir():
        pq.write_table(pq.read_table(path).drop_columns(["started_at"]), path)
    report = build_report(run)
    assert (report["timeline"], report["tail"]) == ([], None)
    assert report["starts"][0]["seconds"] == 10.0, "when the record was last written"
    assert report["wall_clock"]["paid_s"]["lost"] == 0.0
    assert report["slowest"][0]["started_at"] is None


def test_a_forecast_is_compared_with_what_happened(report: dict[str, Any]):
    """Of a start that came to its end: 321 s from the first worker to the last document, where 300 were expected."""
    first, second = report["starts"]
    assert first["forecast"] is None
    assert second["forecast"] == {
        "predicted_s": 300.0,
        "low_s": 200.0,
        "high_s": 500.0,
        "basis": "a sample",
        "actual_s": 321.0,
        "actual_over_predicted": pytest.approx(321 / 300),
    }


def test_a_start_that_was_stopped_proves_no_forecast_wrong(tmp_path: Path):
    """It did a part of the documents."""
    run = write_run(tmp_path / "run")
    rewritten(record(run, SECOND), exit_code=75)
    forecast = build_report(run)["starts"][1]["forecast"]
    assert (forecast["predicted_s"], forecast["actual_s"], forecast["actual_over_predicted"]) == (300.0, None, None)


@pytest.mark.parametrize("value", [7, [], "x", {}, [7, {"worker": 1}, {"worker": "w", "seat": 1, "asked": "noon"}]])
@pytest.mark.parametrize("name", ["workers", "job", "report", "took_over", "forecast", "seen", "begin"])
def test_a_record_that_holds_nonsense_spoils_no_report(tmp_path: Path, name: str, value: object):
    """Somebody edited it, or a later version wrote it."""
    run = one_worker(tmp_path)
    rewritten(record(run, FIRST), **{name: value})
    assert build_report(run)["rows"]["done"] == 5


def test_the_kinds_of_time_are_these():
    """Dashboards and docs/report.md name them."""
    assert KINDS == ("prefill", "decode", "other", "audit", "waiting", "lost", "loading", "dead")
