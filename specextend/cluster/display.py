"""Displays of a run's progress and events: a bar on a terminal, plain lines, or JSON."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from specextend.cluster.messages import Done, Lease
from specextend.cluster.progress import Snapshot, describe_duration
from specextend.core import counted, printable
from specextend.terminal import raw_stream, wrap_streams

LINE_EVERY_S = 30.0
"""Seconds between two lines of a log."""
Fact = str | int | float | None
LogFormat = Literal["text", "json"]


def describe(snapshot: Snapshot) -> str:
    """Describe a snapshot in one line."""
    rate, length = snapshot.output_tokens_per_s, snapshot.mean_acceptance_length
    is_running, num_loading = snapshot.num_workers > 0, snapshot.num_loading
    waiting = f"{counted(num_loading, 'worker')} loading models" if num_loading else "waiting for Ray to start a worker"
    left = "time left unknown yet" if snapshot.eta_s is None else f"{describe_duration(snapshot.eta_s)} left"
    parts = [
        f"{100 * snapshot.fraction:.0f}% of the work",
        left if is_running else "",
        f"{snapshot.num_done:,}/{snapshot.num_rows:,} done",
        f"{snapshot.num_errors} failed" if snapshot.num_errors else "",
        f"{snapshot.num_running} running on {counted(snapshot.num_workers, 'worker')}" if is_running else "",
        waiting if num_loading or not is_running else "",
        f"{rate:,.1f} output tokens/s" if rate is not None else "",
        f"acceptance length {length:.2f}" if length is not None else "",
    ]
    return ", ".join(part for part in parts if part)


@dataclass
class Pace:
    """Limits how often something is done."""

    _every_s: float
    _last: float = -math.inf

    def is_due(self, now: float) -> bool:
        """Return True if `every_s` have passed since the last True, and the first time."""
        if now - self._last < self._every_s:
            return False
        self._last = now
        return True


class Display:
    """Shows the progress of a run and what happens in it: here as a plain line every 30 s, for logs."""

    def __init__(self, write: Callable[[str], object]):
        """Write through `write`, which takes a line without its line end."""
        self._write, self._pace = write, Pace(LINE_EVERY_S)

    def begin(self, run_id: str) -> None:
        """Name this start of the run."""

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Show the progress, if enough time has passed since the last time."""
        if self._pace.is_due(now):
            self._write(describe(snapshot))

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """Report something to people and machines."""
        self._write(printable(message))

    def event(self, name: str, **facts: Fact) -> None:
        """Report something to machines only, because people would find it too detailed."""

    def close(self) -> None:
        """Restore the terminal."""


class BarDisplay(Display):
    """Draws a progress bar on a terminal, with its text in as many lines as it takes, and writes notes above it."""

    def __init__(self, console: Console):
        super().__init__(partial(console.print, markup=False, highlight=False, emoji=False))
        description = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
        self._progress = Progress(BarColumn(bar_width=12), description, console=console)
        self._task = self._progress.add_task("starting", total=1.0)
        self._progress.start()
        if console.is_terminal:
            wrap_streams()  # until the bar ends, rich prints above it what others write there, and would obey its codes

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Update the bar."""
        self._progress.update(self._task, completed=snapshot.fraction, description=describe(snapshot))

    def close(self) -> None:
        """Stop drawing and leave the bar as it is."""
        self._progress.stop()


class JsonDisplay(Display):
    """Writes one JSON object per event and line: `time`, `run`, `event`, facts, and `message` if people get one.

    The facts about a document are its key (`file`, `row`), its id (`document`) once it has been read, `worker` and
    `attempt`.
    """

    _run_id: str | None = None

    def begin(self, run_id: str) -> None:
        """Name this start in every line from now on."""
        self._run_id = run_id

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Write an event, if enough time has passed since the last one."""
        if self._pace.is_due(now):
            self.event("progress", **asdict(snapshot))

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """Write an event with a message."""
        self.event(event, message=message, **facts)

    def event(self, name: str, **facts: Fact) -> None:
        """Write one line, escaped to ASCII, so that no text can break it. Facts that are None or NaN are left out."""
        head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "run": self._run_id, "event": name}
        known = {
            key: value
            for key, value in (head | facts).items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }
        self._write(json.dumps(known))


class Forgiving:
    """A text stream that drops what cannot be written: a full disk or a closed terminal under a log ends no run."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what the stream takes, and report all as written."""
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if the stream can."""
        with suppress(OSError):
            self._stream.flush()


def open_display(stream: TextIO | None = None, log: LogFormat = "text") -> Display:
    """Open the display for `stream` (stderr by default): JSON if asked for, a bar on a terminal, lines elsewhere.

    What cannot be written is dropped.
    """
    stream = stream or sys.stderr
    if log == "text" and stream.isatty():
        return BarDisplay(Console(file=cast(TextIO, Forgiving(raw_stream(stream)))))
    forgiving = Forgiving(stream)

    def write(line: str) -> None:
        forgiving.write(line + "\n")
        forgiving.flush()

    if log == "json":
        return JsonDisplay(write)
    return Display(write)


def lease_facts(worker: str, lease: Lease) -> dict[str, Fact]:
    """Return the facts about a lease for a log that machines read."""
    return lease.key._asdict() | {"worker": worker, "attempt": lease.attempt}


def result_facts(done: Done) -> dict[str, Fact]:
    """Return the facts about a result for a log that machines read; no text of the document is among them."""
    counts = ("num_prompt_tokens", "num_output_tokens", "mean_acceptance_length", "total_s")
    return {"document": done.row["doc_id"]} | {name: getattr(done.stats, name) for name in counts}
