from __future__ import annotations

import io
import json

from specextend.cluster.display import BarDisplay, JsonDisplay, LineDisplay, describe, describe_eta, open_display
from specextend.cluster.progress import Snapshot


def snapshot() -> Snapshot:
    return Snapshot(9, 3, 1, 2, 1, 0.5, 20.0, 2.25, 61.2)


def test_a_log_gets_a_line_every_thirty_seconds_and_no_escape_codes():
    """Job logs are files: a bar in them is noise."""
    stream = io.StringIO()
    display = open_display(stream)
    assert isinstance(display, LineDisplay)
    for second in range(61):
        display.show(snapshot(), float(second))
    display.close()
    lines = stream.getvalue().splitlines()
    assert (
        lines
        == [
            "3/9 done, 1 failed, 2 running on 1 worker, 20.0 output tokens/s, acceptance length 2.25, "
            "50% of the work, 0:01:02 left"
        ]
        * 3
    )


def test_a_terminal_gets_a_bar_and_notes_stay_readable_above_it():
    """Notes say why the bar went back: they must survive it, brackets and all."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    display = open_display(stream)
    assert isinstance(display, BarDisplay)
    display.show(snapshot(), 0.0)
    display.note("worker w1 [pid 7] died")
    display.close()
    assert "worker w1 [pid 7] died" in stream.getvalue()
    assert "3/9 done" in stream.getvalue()


def test_no_time_is_promised_before_anything_is_known():
    """An ETA made of nothing is worse than none."""
    assert describe_eta(None) == "time left unknown yet"
    assert describe_eta(3723.0) == "1:02:03 left"
    assert "None" not in describe(Snapshot(9, 0, 0, 0, 0, 0.0, None, None, None))


def said_as_json(*calls) -> list[dict]:
    stream = io.StringIO()
    display = open_display(stream, "json")
    assert isinstance(display, JsonDisplay)
    for call in calls:
        call(display)
    display.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_machine_gets_one_object_a_line_that_names_the_run():
    """Log collectors split at line ends and search by fields."""
    first, second = said_as_json(
        lambda display: display.note("reading"),
        lambda display: display.begin("0badf00d"),
        lambda display: display.note("d3 failed", "document_failed", document="d3", worker=None, attempt=2),
    )
    assert first == {"time": first["time"], "event": "note", "message": "reading"}
    assert second.pop("time").endswith("+00:00")
    assert second == {
        "run": "0badf00d",
        "event": "document_failed",
        "message": "d3 failed",
        "document": "d3",
        "attempt": 2,
    }


def test_no_text_of_a_document_can_break_a_line():
    """Ids and messages come from data: line ends, control characters, halves of characters."""
    text = "a\nb\u2028c\x00\x1b[31m\ud800"
    [event] = said_as_json(lambda display: display.event("document_done", document=text))
    assert event["document"] == text


def test_a_machine_hears_of_progress_every_thirty_seconds():
    """The numbers of the line that people get, by name."""
    events = said_as_json(*[lambda display, now=now: display.show(snapshot(), float(now)) for now in range(61)])
    assert [event["event"] for event in events] == ["progress"] * 3
    assert (events[0]["num_done"], events[0]["num_rows"], events[0]["eta_s"]) == (3, 9, 61.2)
