"""Where a run shows how far it is and what happens to it: a bar, lines, or JSON for machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from specextend.cluster.progress import Snapshot
from specextend.core import printable

LINE_EVERY_S = 30.0
Fact = str | int | float | None
LogFormat = Literal["text", "json"]


class Display(Protocol):
    """Where a run shows how far it is and what happens to it."""

    def begin(self, run_id: str) -> None:
        """Say which start this is."""

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Show it, if it is time to."""

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """Say that something happened, to people and machines."""

    def event(self, name: str, **facts: Fact) -> None:
        """Say to machines what would be too much for people."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def describe(snapshot: Snapshot) -> str:
    """A snapshot in one line."""
    rate, length = snapshot.output_tokens_per_s, snapshot.mean_acceptance_length
    parts = [
        f"{snapshot.num_done}/{snapshot.num_rows} done",
        f"{snapshot.num_errors} failed" if snapshot.num_errors else "",
        f"{snapshot.num_running} running on {snapshot.num_workers} worker{'s' if snapshot.num_workers != 1 else ''}",
        f"{rate:,.1f} output tokens/s" if rate is not None else "",
        f"acceptance length {length:.2f}" if length is not None else "",
        f"{100 * snapshot.fraction:.0f}% of the work, {describe_eta(snapshot.eta_s)}",
    ]
    return ", ".join(part for part in parts if part)


def describe_eta(seconds: float | None) -> str:
    """`1:02:03 left`, rounded up to seconds."""
    if seconds is None:
        return "time left unknown yet"
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} left"


class Pace:
    """Says when it is time again."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether the last time that it was is `every_s` ago; the first time it is."""
        if self._last is not None and now - self._last < self._every_s:
            return False
        self._last = now
        return True


class LineDisplay:
    """A plain line every 30 s: what a log can hold."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """`write` takes a line without its end."""
        self._write, self._pace = write, Pace(LINE_EVERY_S)

    def begin(self, run_id: str) -> None:
        """Nothing that people need."""

    def show(self, snapshot: Snapshot, now: float) -> None:
        """One line, if the last is old enough."""
        if self._pace.is_due(now):
            self._write(describe(snapshot))

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """One line, now."""
        self._write(printable(message))

    def event(self, name: str, **facts: Fact) -> None:
        """Nothing that people need."""

    def close(self) -> None:
        """Nothing to restore."""


class BarDisplay:
    """A bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(BarColumn(bar_width=24), TextColumn("{task.description}"), console=console)
        self._task = self._progress.add_task("starting", total=1.0)
        self._progress.start()

    def begin(self, run_id: str) -> None:
        """Nothing that people need."""

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=snapshot.fraction, description=describe(snapshot))

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """A line above the bar."""
        self._progress.console.print(printable(message), markup=False, highlight=False)

    def event(self, name: str, **facts: Fact) -> None:
        """Nothing that people need."""

    def close(self) -> None:
        """End the bar where it is."""
        self._progress.stop()


class JsonDisplay:
    """One object a line and event: `time`, `run`, `event`, `message` where people would be told one, and facts.

    Facts about a document are its key (`file`, `row`), its id (`document`) once it was read, `worker` and `attempt`.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        """`write` takes a line without its end."""
        self._write, self._pace = write, Pace(LINE_EVERY_S)
        self._run_id: str | None = None

    def begin(self, run_id: str) -> None:
        """Every line from now on names this start."""
        self._run_id = run_id

    def show(self, snapshot: Snapshot, now: float) -> None:
        """An event, if the last is old enough."""
        if self._pace.is_due(now):
            self.event("progress", **asdict(snapshot))

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """An event with a message."""
        self.event(event, message=message, **facts)

    def event(self, name: str, **facts: Fact) -> None:
        """One line. Facts that are None are left out; all is escaped to ASCII, so no text can break the line."""
        head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "run": self._run_id, "event": name}
        self._write(json.dumps({key: value for key, value in (head | facts).items() if value is not None}))

    def close(self) -> None:
        """Nothing to restore."""


def open_display(stream: TextIO | None = None, log: LogFormat = "text") -> Display:
    """JSON if asked for; else a bar where `stream` (stderr) is a terminal, or lines."""
    stream = stream or sys.stderr
    if log == "text" and stream.isatty():
        return BarDisplay(Console(file=stream))

    def write(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()

    return JsonDisplay(write) if log == "json" else LineDisplay(write)
