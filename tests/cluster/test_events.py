"""What a run tells machines: enough to say afterwards who did what when, and nothing of the documents' text."""

import io
import json

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.progress import open_display

GOOD = [f"secret text {number} " * (number + 1) for number in range(5)]


def of(events, name):
    return [event for event in events if event["event"] == name]


def test_the_log_tells_the_story_of_every_document(job, tmp_path):
    """Given to whom, at which attempt, and how it ended: each once, and as the output says it."""
    stream = io.StringIO()
    run = job([*GOOD, "raise", f"kill:{tmp_path}/killed"])
    run.screen = open_display(stream, "json")
    assert run.run() == EXIT_TOO_MANY_ERRORS
    log = stream.getvalue()
    events = [json.loads(line) for line in log.splitlines()]
    [attempt] = (run.output / "_run" / "attempts").iterdir()
    assert {event["run"] for event in events} == {attempt.stem}
    assert events[0]["event"] == "run_started"
    assert events[-1]["event"] == "run_ended"
    assert events[-1]["exit_code"] == EXIT_TOO_MANY_ERRORS
    done = of(events, "document_done")
    failed = of(events, "document_failed")
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
