"""Progress of a run: clock, work done and left, the stop after many failures, and displays."""

import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TextIO, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from specextend.cluster.backlog import Estimates
from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS, RunError
from specextend.cluster.messages import Done, Lease
from specextend.core import DocumentKey, counted, printable
from specextend.data.inputs import DocumentError
from specextend.stats import PHASES, DecodingStats, ratio
from specextend.terminal import raw_stream, wrap_streams

MAX_GAP_S = 10.0
"""Seconds that count between two readings."""
WINDOW_S = 600.0
"""Seconds over which the rate is averaged."""
DEFAULT_OUTPUT_COST = 10.0
"""Cost of an output token relative to a prompt token, before it is measured."""
LEAST_LIMIT = 0.5
"""Share of failures up to which no run stops early."""
MIN_ENDED = 100
MIN_SHARE = 0.01
"""The longest documents come first and fail more often."""


class AwakeClock:
    """Clock of the driver, which skips the time while its process or machine is suspended.

    Otherwise every worker would seem hung. A gap counts for at most `MAX_GAP_S`, a step back for
    nothing.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic):
        self._source = source
        self._last = source()
        self._now = 0.0

    def __call__(self) -> float:
        """Return seconds without gaps."""
        seconds = self._source()
        self._now += min(max(0.0, seconds - self._last), MAX_GAP_S)
        self._last = seconds
        return self._now


class Snapshot(NamedTuple):
    """Figures of a run at a given time."""

    num_rows: int
    num_done: int
    num_errors: int
    num_running: int
    num_workers: int
    num_loading: int
    fraction: float
    """Share of the work done, 0 to 1."""
    output_tokens_per_s: float | None
    """Rate of all workers over `WINDOW_S`."""
    mean_acceptance_length: float | None
    eta_s: float | None
    """None before a worker is ready and a document is done."""


class Ledger:
    """Work done and left, in prompt tokens + w * output tokens (`output_cost`)."""

    def __init__(
        self,
        estimates: Estimates,
        num_done: int,
        num_errors: int,
        work: DecodingStats | None = None,
        draft_kind: str | None = None,
    ):
        """Begin a start. Counts and `work` are those of earlier starts."""
        self._estimates = estimates
        self._num_rows = len(estimates) + num_done + num_errors
        self._num_done = num_done
        self._num_errors = num_errors
        self._draft_kind = draft_kind
        self._prompt_left = int(estimates.num_prompt_tokens.sum(dtype=np.int64))
        self._output_left = int(estimates.max_new_tokens.sum(dtype=np.int64))
        self._output_allowed = num_done * self._output_left / max(1, len(estimates))
        self._stats = DecodingStats()
        self._stats.add(work or DecodingStats())
        self._prompt_done = self._stats.num_prompt_tokens - self._stats.num_cached_tokens
        self._history: deque[tuple[float, int, int]] = deque()

    def finish(
        self, key: DocumentKey, stats: DecodingStats | None, *, has_failed: bool = False
    ) -> None:
        """Record a document and its counts, or an error row (None); tasks of it may have failed."""
        estimate = self._estimates[key]
        self._prompt_left -= estimate.num_prompt_tokens
        self._output_left -= estimate.max_new_tokens
        if stats is None or has_failed:
            self._num_errors += 1
        else:
            self._num_done += 1
        if stats is None:
            return
        self._prompt_done += estimate.num_prompt_tokens
        self._output_allowed += estimate.max_new_tokens
        self._stats.add(stats)

    @property
    def doubt(self) -> str:
        """Warn if the draft hardly fits its target; else return an empty string."""
        return self._stats.doubt(self._draft_kind, self._num_done)

    @property
    def output_cost(self) -> float:
        """Return w, the seconds per output token over the seconds per prompt token."""
        stats = self._stats
        prefill = ratio(stats.prefill_s + stats.draft_prefill_s, self._prompt_done)
        decode = ratio(stats.step_s, stats.num_output_tokens)
        return decode / prefill if prefill and decode else DEFAULT_OUTPUT_COST

    def snapshot(
        self,
        now: float,
        num_workers: int,
        num_loading: int = 0,
        running: Sequence[tuple[int, int, int]] = (),
    ) -> Snapshot:
        """Return the current figures and keep them for the rate. Call about once a second.

        Args:
            now: Seconds of any monotonic clock.
            running: See `Scheduler.running`.
        """
        if not num_workers:
            self._history.clear()  # loading is not part of the rate
        read, allowed, written = np.array([(0, 0, 0), *running]).sum(axis=0).tolist()
        prompt = self._prompt_done + read
        output = self._stats.num_output_tokens + written
        self._history.append((now, prompt, output))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()
        then, prompt_then, output_then = self._history[0]
        cost = self.output_cost
        elapsed = now - then
        done = prompt + cost * output
        # outputs are assumed to end as early as the finished ones
        share = ratio(self._stats.num_output_tokens, self._output_allowed) or 1.0
        output_left = share * self._output_left - min(written, share * allowed)
        left = max(0.0, self._prompt_left - read + cost * output_left)
        rate = ratio(prompt - prompt_then + cost * (output - output_then), elapsed)
        return Snapshot(
            num_rows=self._num_rows,
            num_done=self._num_done,
            num_errors=self._num_errors,
            num_running=len(running),
            num_workers=num_workers,
            num_loading=num_loading,
            fraction=done / (done + left) if done + left else 1.0,
            output_tokens_per_s=ratio(output - output_then, elapsed),
            mean_acceptance_length=self._stats.mean_acceptance_length,
            eta_s=left / rate if rate and self._num_done else None,
        )


class Metrics:
    """Counters exported by a connected Ray as `ray_specextend_*_total`."""

    def __init__(self, run_id: str, num_failed: int = 0):
        from ray.util import metrics

        names = ("documents", "tokens", "steps", "seconds")
        keys = ("run_id", "kind")
        self._counters = {
            name: metrics.Counter(f"specextend_{name}", tag_keys=keys) for name in names
        }
        self._run_id = run_id
        self._add("documents", failed=num_failed)

    def count(self, stats: DecodingStats | None) -> None:
        """Count a finished document, or a failed one (None)."""
        if stats is None:
            self._add("documents", failed=1)
            return
        kinds = ("prompt", "cached", "output", "draft", "accepted")
        self._add("documents", done=1)
        self._add("tokens", **{kind: getattr(stats, f"num_{kind}_tokens") for kind in kinds})
        self._add("steps", speculative=stats.num_spec_steps, plain=stats.num_plain_steps)
        self._add("seconds", **{phase[: -len("_s")]: getattr(stats, phase) for phase in PHASES})

    def _add(self, name: str, **values: float) -> None:
        for kind, value in values.items():
            if value > 0:  # Ray refuses others
                self._counters[name].inc(value, {"run_id": self._run_id, "kind": kind})


class ErrorGuard:
    """Stops a run if most of its documents fail, except by their content, such as null text."""

    def __init__(self, allowed: float, num_documents: int):
        self._limit = max(LEAST_LIMIT, allowed)
        self._least = max(MIN_ENDED, MIN_SHARE * num_documents)
        self._num_done = 0
        self._failed: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def count(self, error: DocumentError | None) -> None:
        """Count a document, unless its content is at fault."""
        if error is None:
            self._num_done += 1
        elif error.retryable or error.stage not in ("read", "prompt"):
            self._failed[error.error_class] += 1
            self._examples.setdefault(error.error_class, f"{error.doc_id}: {error.message}")

    def check(self) -> None:
        """Raise RunError after too many failures."""
        num_failed = self._failed.total()
        num_ended = self._num_done + num_failed
        if num_ended < self._least or num_failed <= self._limit * num_ended:
            return
        [(name, _)] = self._failed.most_common(1)
        raise RunError(
            f"stopped early: {num_failed:,} of {counted(num_ended, 'document')} failed, more than "
            f"{self._limit:.0%}, most often with {name}, such as {self._examples[name]}; "
            "finished work is kept: fix the cause and run again with --retry-errors, or raise "
            "job.max_error_fraction",
            EXIT_TOO_MANY_ERRORS,
        )


def describe_duration(seconds: float) -> str:
    """Format a duration as `1:02:03` or `1 day, 2:03:04`, rounded up to seconds."""
    return str(timedelta(seconds=math.ceil(seconds)))


LINE_EVERY_S = 30.0
"""Seconds between progress lines."""
Fact = str | int | float | None
LogFormat = Literal["text", "json"]


def describe(snapshot: Snapshot) -> str:
    """Format a snapshot as a line."""
    rate = snapshot.output_tokens_per_s
    length = snapshot.mean_acceptance_length
    is_running = snapshot.num_workers > 0
    num_loading = snapshot.num_loading
    waiting = (
        f"{counted(num_loading, 'worker')} loading models"
        if num_loading
        else "waiting for Ray to start a worker"
    )
    left = (
        "time left unknown yet"
        if snapshot.eta_s is None
        else f"{describe_duration(snapshot.eta_s)} left"
    )
    parts = [
        f"{100 * snapshot.fraction:.0f}% of the work",
        left if is_running else "",
        f"{snapshot.num_done:,}/{snapshot.num_rows:,} done",
        f"{snapshot.num_errors} failed" if snapshot.num_errors else "",
        f"{snapshot.num_running} running on {counted(snapshot.num_workers, 'worker')}"
        if is_running
        else "",
        waiting if num_loading or not is_running else "",
        f"{rate:,.1f} output tokens/s" if rate is not None else "",
        f"acceptance length {length:.2f}" if length is not None else "",
    ]
    return ", ".join(part for part in parts if part)


@dataclass
class Pace:
    """Limits the frequency of an action."""

    _every_s: float
    _last: float = -math.inf

    def is_due(self, now: float) -> bool:
        """Return True the first time, and an interval after each True."""
        if now - self._last < self._every_s:
            return False
        self._last = now
        return True


class Display:
    """Reports progress and events as lines of a log."""

    def __init__(self, write: Callable[[str], object]):
        self._write, self._pace = write, Pace(LINE_EVERY_S)

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Report the progress, at most every `LINE_EVERY_S`."""
        if self._pace.is_due(now):
            self.event("progress", describe(snapshot), **snapshot._asdict())

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """Report an event to people and machines."""
        self.event(event, message, **facts)

    def event(self, name: str, message: str = "", /, **facts: Fact) -> None:
        """Report an event to machines, and its message, if any, to people."""
        if message:
            self._write(printable(message))

    def close(self) -> None:
        """Restore the terminal."""


class BarDisplay(Display):
    """Draws a progress bar on a terminal, with messages above it."""

    def __init__(self, console: Console):
        super().__init__(partial(console.print, markup=False, highlight=False, emoji=False))
        description = TextColumn(
            "{task.description}", markup=False, table_column=Column(overflow="fold")
        )
        self._progress = Progress(BarColumn(bar_width=12), description, console=console)
        self._task = self._progress.add_task("starting", total=1.0)
        self._progress.start()
        if console.is_terminal:
            # rich prints output of others above the bar, and would obey its control codes
            wrap_streams()

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Update the bar."""
        self._progress.update(
            self._task, completed=snapshot.fraction, description=describe(snapshot)
        )

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


class JsonDisplay(Display):
    """Writes a JSON object per event and line: `time`, `run`, `event`, its facts, any `message`.

    Events about a document name its `file`, `row` and, once known, `document` (its id), and
    `worker` and `attempt`.
    """

    _run_id: Fact = None

    def event(self, name: str, message: str = "", /, **facts: Fact) -> None:
        """Write a line of ASCII without facts that are None or NaN."""
        self._run_id = facts.get("run", self._run_id)
        head = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "run": self._run_id,
            "event": name,
            "message": message or None,
        }
        known = {
            key: value
            for key, value in (head | facts).items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }
        self._write(json.dumps(known))


class Forgiving:
    """A text stream that drops failed writes, because a full disk must not end a run."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write or drop `text`."""
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError):
            self._stream.flush()


def open_display(stream: TextIO | None = None, log: LogFormat = "text") -> Display:
    """Open a display for `stream` (default stderr): JSON, a bar on a terminal, or plain lines."""
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
    """Describe a lease for the log."""
    return lease.key._asdict() | {"worker": worker, "attempt": lease.attempt}


def result_facts(done: Done) -> dict[str, Fact]:
    """Describe a result for the log, without any text of the document."""
    counts = ("num_prompt_tokens", "num_output_tokens", "mean_acceptance_length", "total_s")
    return {"document": done.row["doc_id"]} | {name: getattr(done.stats, name) for name in counts}
