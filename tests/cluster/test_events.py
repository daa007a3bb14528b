"""What a run tells machines: enough to say afterwards who did what when, and nothing of the documents' text."""

import io
import json

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.progress import open_display

GOOD = [f"secret text {number} " * (number + 1) for number in range(5)]


def test_the_log_tells_the_story_of_every_document(job, tmp_path):
    """Given to whom, at which attempt, and how it ended: each once, and as the output says it."""
    stream = io.StringIO()
    run = job([*GOOD, "raise", f"kill:{tmp_path}/killed"])
    run.screen = open_display(stream, "json")
    assert run.run() == EXIT_TOO_MANY_ERRORS
    log = stream.getvalue()
    events = [json.loads(line) for line in log.splitlines()]

    def told(name, *facts):
        return [tuple(event[fact] for fact in facts) for event in events if event["event"] == name]

    [attempt] = (run.output / "_run" / "attempts").iterdir()
    assert {event["run"] for event in events} == {attempt.stem}
    assert events[0]["event"] == "run_started"
    assert told("run_ended", "exit_code") == [(EXIT_TOO_MANY_ERRORS,)]
    assert dict(told("document_done", "document", "attempt")) == {
        name: row["attempts"] for name, row in run.summaries().items()
    }
    assert told("document_failed", "document", "row", "error_class") == [("d5", 5, "ValueError")]
    lease = ("file", "row", "attempt", "worker")
    ended = told("document_done", *lease) + told("document_failed", *lease)
    assert len(ended) == 7
    assert {*ended} <= {*told("document_leased", *lease)}
    ready = dict(told("worker_ready", "worker", "pid"))
    assert len(set(ready.values())) == len(ready) == 2
    [(died,)] = told("worker_died", "worker")
    assert died in ready
    assert "secret" not in log, "text of documents belongs into the output alone"
