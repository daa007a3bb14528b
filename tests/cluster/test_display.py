import io
import json
import math
import re
import sys

import pytest

from specextend.cluster.progress import (
    BarDisplay,
    Snapshot,
    open_display,
)


def snapshot():
    return Snapshot(9, 3, 1, 2, 1, 0, 0.5, 20.0, 2.25, 61.2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_notes_stay_readable_above_it():
    """Notes say why the bar went back: they must survive it, brackets and all."""
    stream = Terminal()
    display = open_display(stream)
    assert isinstance(display, BarDisplay)
    display.show(snapshot(), 0.0)
    display.note(HOSTILE)
    display.close()
    assert SHOWN in stream.getvalue(), "text and no markup"
    assert "3/9 done" in stream.getvalue()


def test_nothing_is_cut_where_a_terminal_is_narrow(monkeypatch):
    """At 80 columns the bar and the time left were what was missing."""
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    display = open_display(stream)
    display.show(snapshot()._replace(num_rows=10_000_000, num_done=123_456), 0.0)
    display.close()
    drawn = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()]
    assert max(map(len, drawn)) <= 80
    assert drawn[-2].startswith("━━━━━━╺━━━━━ 50% of the work, 0:01:02 left, 123,456/10,000,000 done, 1 failed,")
    assert drawn[-1].endswith("20.0 output tokens/s, acceptance length 2.25")


HOSTILE = "[red]a[/red] [link=http://x]b[/link] :smile: \x1b[2J\u202ec\nd"
SHOWN = r"[red]a[/red] [link=http://x]b[/link] :smile: \x1b[2J\u202ec\nd"


def test_what_others_print_under_a_bar_is_text(monkeypatch):
    """Ray prints its workers' lines to stderr; rich moves them above the bar, and obeys codes and links in them."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    display = open_display(stream)
    sys.stderr.write("(Worker pid=7) \x1b]8;;http://evil.example\x1b\\x\x1b[31mred\n")
    display.close()
    assert sys.stderr is stream
    assert r"(Worker pid=7) \x1b]8;;http://evil.example\x1b\x\x1b[31mred" in stream.getvalue()
    assert "\x1b]8" not in stream.getvalue()


def test_a_machine_gets_one_object_a_line_that_names_the_run():
    """Log collectors split at line ends and search by fields. Whatever the texts and numbers are, it is JSON: `NaN` and
    infinity are left out.
    """
    text = "a\nb\u2028c\x00\x1b[31m\ud800"
    stream = io.StringIO()
    display = open_display(stream, "json")
    display.note("reading")
    display.event("run_started", run="0badf00d")
    display.note("d3 failed", "document_failed", document=text, worker=None, attempt=2, a=math.nan, b=math.inf)
    display.close()
    first, _, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["message"]) == ("note", "reading")
    assert second.pop("time").endswith("+00:00")
    facts = {"run": "0badf00d", "event": "document_failed", "message": "d3 failed", "document": text, "attempt": 2}
    assert second == facts


@pytest.mark.parametrize("log", ["text", "json"])
def test_a_log_that_takes_no_more_lines_ends_no_run(log):
    """Stderr on a full disk: progress was the last thing that a run of three nights wrote."""
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115  what closing says is no error of the test
    display = open_display(full, log)
    for second in range(0, 3000, 30):
        display.show(snapshot(), float(second))
        display.note("a note " * 100)
    display.close()
    with pytest.raises(OSError, match="No space left"):
        full.close()
