"""What a run tells machines: enough to say afterwards who did what when, and nothing of the documents' text."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from specextend.cluster.display import open_display
from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.data.run_folder import RELEASED, parse_time, read_starts
from specextend.data.storage import resolve
from tests.cluster.conftest import Job
from tests.job.conftest import kept_handlers

GOOD = [f"secret text {number} " * (number + 1) for number in range(5)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> tuple[Job, str]:
    """A run with one bad document and one worker that dies, and its log. Tests only read it."""
    folder, stream = tmp_path_factory.mktemp("logged"), io.StringIO()
    run = Job(folder, [*GOOD, "raise", f"kill:{folder}/killed"], {})
    run.screen = open_display(stream, "json")
    with kept_handlers():
        assert run.run() == EXIT_TOO_MANY_ERRORS
    return run, stream.getvalue()


def of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def test_the_log_tells_the_story_of_every_document(logged: tuple[Job, str]):
    """Given to whom, at which attempt, and how it ended: each once, and as the output says it."""
    run, log = logged
    events = [json.loads(line) for line in log.splitlines()]
    [attempt] = (run.output / "_run" / "attempts").iterdir()
    assert {event["run"] for event in events} == {attempt.stem}
    assert [events[0]["event"], events[-1]["event"]] == ["run_started", "run_ended"]
    assert events[-1]["exit_code"] == EXIT_TOO_MANY_ERRORS
    done, failed = of(events, "document_done"), of(events, "document_failed")
    assert {event["document"]: event["attempt"] for event in done} == {
        name: row["attempts"] for name, row in run.summaries().items()
    }
    assert [(event["document"], event["row"], event["error_class"]) for event in failed] == [("d5", 5, "ValueError")]
    assert len(done) + len(failed) == 7
    leased = {
        (event["file"], event["row"], event["attempt"], event["worker"]) for event in of(events, "document_leased")
    }
    assert {(event["file"], event["row"], event["attempt"], event["worker"]) for event in done + failed} <= leased
    ready = {event["worker"]: event["pid"] for event in of(events, "worker_ready")}
    [died] = of(events, "worker_died")
    assert died["worker"] in ready
    assert len(set(ready.values())) == len(ready) == 2
    assert "secret" not in log, "text of documents belongs into the output alone"


def test_the_record_of_a_start_says_when_each_worker_came_and_went(logged: tuple[Job, str]):
    """From it the report knows what the night cost; its times agree with those of the documents."""
    run, _ = logged
    [start] = read_starts(resolve(str(run.output)))
    assert start.workers is not None
    first, second = start.workers
    begin, end = parse_time(start.begin), parse_time(start.end)
    assert begin <= first.asked <= first.begun <= first.ready <= first.gone <= second.asked
    assert second.asked <= second.begun <= second.ready <= second.gone <= end
    assert (first.seat, first.worker, second.seat, second.worker) == (1, "worker-1", 1, "worker-2")
    assert first.reason not in (None, RELEASED)
    assert second.reason == RELEASED
    times = {worker.name: (worker.ready, worker.gone) for worker in start.workers}
    for row in run.summaries().values():
        since, until = times[row["worker"]]
        assert since - 1 <= row["started_at"].timestamp() <= until, "the driver hears of a worker within its poll"
