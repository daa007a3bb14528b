"""Records of a run in progress: commits of finished rows, records of starts, and the status.

`specextend status` imports this module, so it must not import Ray or torch.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS, writing
from specextend.cluster.lock import LockHolder, OutputLock, read_lock
from specextend.cluster.messages import Place, Tried
from specextend.core import DocumentKey, ReadOnly, Values, counted, printable
from specextend.data.commits import CommitWriter, Progress, read_commits
from specextend.data.fingerprint import num_input_rows, read_manifest
from specextend.data.inputs import DocumentError
from specextend.data.run_folder import (
    RELEASED,
    Start,
    lock_file,
    parse_start,
    read_starts,
    read_success,
    starts_folder,
    success_file,
    time_text,
)
from specextend.data.schema import FAILURE
from specextend.data.storage import Location, exists, write_bytes
from specextend.folders import code_commit, package_version

if TYPE_CHECKING:  # they import torch
    from specextend.cluster.progress import Display
    from specextend.config import RunConfig

LEAST_ROWS = 64
ROWS_PER_WORKER = 8
"""Rows per commit, to limit a large run to thousands of files."""
_PACKAGES = ("specextend", "torch", "transformers", "ray", "pyarrow", "numpy")


class StartRecord:
    """The record of a start, `_run/attempts/<run id>.json`, from its lock to its exit code.

    Worker events are kept in memory until `write`.
    """

    def __init__(
        self,
        output: Location,
        run_id: str,
        config: RunConfig,
        models: Mapping[str, Mapping[str, str | None]] | None = None,
        *,
        took_over: LockHolder | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Fill the record. `took_over` is a dead driver whose lock was taken over."""
        self._file = starts_folder(output).child(f"{run_id}.json")
        self._clock = clock
        self._workers: dict[str, Values] = {}
        self.is_changed = False
        self._record: Values = {
            "run_id": run_id,
            "begin": self._now(),
            "end": None,
            "exit_code": None,
            "seen": self._now(),
            "driver": {"host": socket.gethostname(), "pid": os.getpid()},
            "took_over": took_over
            and {"run_id": took_over.run_id, "heartbeat": took_over.heartbeat},
            "versions": library_versions(),
            "git_commit": code_commit(),
            "models": dict(models or {}),
            "job": asdict(config.job),
            "report": asdict(config.report),
            "workers": [],
            "charges": {},
            "memory": None,
            "planned_gib": None,
        }

    def ending(self, exit_code: int) -> Start:
        """Set the end to now, for the report, which is written before the record."""
        self._record["end"] = self._now()
        return parse_start(self._contents() | {"exit_code": exit_code}, self._record["run_id"])

    @property
    def start(self) -> Start:
        """Return the current record."""
        return parse_start(self._contents(), self._record["run_id"])

    def worker_asked(self, worker: str, seat: int) -> None:
        """Record a request for a worker; its replacement has the same `seat`, from 1."""
        unknown = dict.fromkeys(("begun", "ready", "gone", "reason", "used_gib", "speedup"))
        self._workers[worker] = {"worker": worker, "seat": seat, "asked": self._now(), **unknown}
        self.is_changed = True

    def note(self, worker: str, event: Literal["begun", "ready", "gone"], **facts: Any) -> None:
        """Record the time and the facts of an event."""
        self._add(worker, **{event: self._now()}, **facts)

    def worker_used(self, worker: str, gib: float) -> bool:
        """Record a peak memory; return True for the first of any worker."""
        if gib <= (self._workers[worker]["used_gib"] or 0.0):
            return False
        is_first = not any(each["used_gib"] for each in self._workers.values())
        self._add(worker, used_gib=gib)
        return is_first

    def worker_tried(self, worker: str, speedup: float | None) -> bool:
        """Record the speedup of a draft trial; return True if it has changed."""
        if speedup == self._workers[worker]["speedup"]:
            return False
        self._add(worker, speedup=speedup)
        return True

    def workers_released(self) -> None:
        """Record the regular end of all remaining workers."""
        for worker, entry in self._workers.items():
            if entry["gone"] is None:
                self.note(worker, "gone", reason=RELEASED)

    @property
    def planned_gib(self) -> float:
        """Return the planned memory of a worker; 0 if unknown."""
        return self._record["planned_gib"] or 0.0

    def plan(self, memory: ReadOnly) -> None:
        """Store the result of `plan_memory`."""
        self._record |= {"memory": dict(memory), "planned_gib": sum(memory["memory_gib"].values())}
        self.is_changed = True

    def charged(self, charges: Mapping[DocumentKey, Tried]) -> None:
        """Write the attempts at open documents, with those of earlier starts."""
        self._record["charges"] = {
            f"{key.file}:{key.row}": {"attempts": tried.attempts, "struck": sorted(tried.struck)}
            for key, tried in charges.items()
        }
        self.write()

    def end(self, exit_code: int, reason: str | None = None) -> None:
        """Write the record with its end: the time set by `ending`, or now."""
        self._record |= {
            "end": self._record["end"] or self._now(),
            "exit_code": exit_code,
            "reason": reason,
        }
        self.write()

    def write(self) -> None:
        """Write the record."""
        write_bytes(self._file, json.dumps(self._contents(), indent=2).encode())
        self.is_changed = False

    def _add(self, worker: str, **facts: Any) -> None:
        self._workers[worker] |= facts
        self.is_changed = True

    def _contents(self) -> Values:
        return self._record | {"seen": self._now(), "workers": list(self._workers.values())}

    def _now(self) -> str:
        return time_text(self._clock())


def rows_per_commit(workers: int) -> int:
    """Return the size of a commit."""
    return max(LEAST_ROWS, ROWS_PER_WORKER * workers)


@dataclass(slots=True)
class Committer:
    """Collects finished rows and commits them by number or time."""

    output: Location
    writer: CommitWriter
    record: StartRecord
    lock: OutputLock
    every_rows: int
    every_s: float
    _rows: list[Values] = field(default_factory=list)
    _committed_at: float = 0.0

    def add(self, row: Values) -> None:
        """Add a finished row."""
        self._rows.append(row)

    def commit_if_due(self, now: float) -> None:
        """Check the lock, and commit if it is time. Raises as `commit`."""
        self.lock.check()
        is_time = now - self._committed_at >= self.every_s
        if len(self._rows) >= self.every_rows or (
            is_time and (self._rows or self.record.is_changed)
        ):
            self.commit()
            self._committed_at = now

    def commit(self) -> None:
        """Write the rows, and the record if it has changed. Raises RunError or OutputError."""
        with writing(self.output):
            self.writer.commit(self._rows)
            if self.record.is_changed:
                self.record.write()
        self._rows = []

    def remember(self, charges: Mapping[DocumentKey, Tried]) -> None:
        """Record the attempts at open documents. Raises as `commit`."""
        with writing(self.output):
            self.record.charged(charges)


def say_failed(
    display: Display, key: DocumentKey, error: DocumentError, attempts: int, worker: str = ""
) -> None:
    """Report a failed document."""
    display.note(
        f"document {error.doc_id} failed: {error}",
        "document_failed",
        **key._asdict(),
        document=error.doc_id,
        worker=worker,
        attempt=attempts,
        stage=error.stage,
        error_class=error.error_class,
    )


def task_error(row: ReadOnly) -> DocumentError | None:
    """Return the failure of some tasks of a document, if any."""
    if row.get("error_class") is None:
        return None
    return DocumentError(**{name: row[name] for name in (*FAILURE.names, "doc_id")})


def tried_before(output: Location, progress: Progress) -> dict[DocumentKey, Tried]:
    """Collect attempts of earlier starts. Attempts with an error row are forgiven.

    Unreadable entries are skipped: at worst, the document gets all attempts again.
    """
    charges: dict[DocumentKey, Tried] = {}
    for name, charge in (entry for start in read_starts(output) for entry in start.charges.items()):
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            file, _, row = name.partition(":")
            key = DocumentKey(int(file), int(row))
            attempts = int(charge["attempts"])
            struck = frozenset(Place(str(host), str(device)) for host, device in charge["struck"])
            before = charges.get(key, Tried(0))
            charges[key] = Tried(max(before.attempts, attempts), before.struck | struck)
    tried: dict[DocumentKey, Tried] = {}
    for key in (charges.keys() | progress.attempts.keys()) - progress.done:
        charged = charges.get(key, Tried(0))
        forgiven = progress.attempts.get(key, 0)
        tried[key] = Tried(max(charged.attempts, forgiven), charged.struck, forgiven)
    return tried


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of libraries that may affect results."""
    installed = {
        package: package_version(package) or "not installed as a package" for package in _PACKAGES
    }
    return {"python": platform.python_version(), **installed}


def read_status(output: Location) -> Values:
    """Read the state of a run, its rows and starts. Damaged records become `warnings`.

    Raises ValueError without a run, or for uncountable rows.
    """
    manifest = read_manifest(output)
    driver = read_lock(output)
    now = time.time()
    is_alive = driver is not None and driver.seems_alive(now)
    if manifest is None:
        what = (
            f"no run yet: {driver} is reading its input"
            if is_alive
            else "no run (_run/manifest.json is missing)"
        )
        raise ValueError(f"{output.path} holds {what}")
    starts = read_starts(output)
    progress = read_commits(output)
    success = read_success(output)
    num_rows = num_input_rows(manifest)
    num_left = num_rows - len(progress.done) - len(progress.errors)
    warnings = [
        f"_run/attempts/{start.run_id}.json cannot be read: {start.damage}"
        for start in starts
        if start.damage
    ]
    if success is None and exists(success_file(output)):
        warnings.insert(0, "_SUCCESS cannot be read; run again to restore it")
    if driver is None and exists(lock_file(output)):
        warnings.insert(0, "_run/lock cannot be read; if no driver is running, delete it")
    draft = manifest["config"].get("draft") or {}
    if doubt := progress.work.doubt(draft.get("kind"), len(progress.done)):
        warnings.append(doubt)
    whole = [start for start in starts if start.damage is None]
    return {
        "state": "running"
        if is_alive
        else _state(whole, num_left, is_complete=success is not None),
        "rows": num_rows,
        "done": len(progress.done),
        "errors": len(progress.errors),
        "errors_by_class": dict(Counter(progress.errors.values()).most_common()),
        "partial": progress.num_partial,
        "left": num_left,
        "driver": None if driver is None else str(driver),
        "heartbeat_age_s": None if driver is None else now - driver.heartbeat,
        "fingerprint": manifest["fingerprint"],
        "starts": whole,
        "warnings": warnings,
    }


def _state(starts: list[Start], num_left: int, *, is_complete: bool) -> str:
    if is_complete:
        return "complete"
    is_finished = not num_left and ended_with_errors(starts)
    return "finished with errors" if is_finished else "stopped, run again to resume"


def ended_with_errors(starts: Sequence[Start]) -> bool:
    """Return True if the last start ended with exit code 3."""
    return bool(starts) and starts[-1].exit_code == EXIT_TOO_MANY_ERRORS


def describe_status(status: Values) -> str:
    """Format the status for people. Text from records cannot add lines."""
    lines = [
        f"{status['state']}: {status['done']:,} of {counted(status['rows'], 'row')} done, "
        f"{status['errors']:,} failed, {status['left']:,} left",
    ]
    lines += [f"errors: {count} {name}" for name, count in status["errors_by_class"].items()]
    if status["partial"]:
        lines.append(
            f"of these, {status['partial']:,} failed in some tasks; the others are in summaries/"
        )
    if status["driver"]:
        lines.append(
            f"driver: {status['driver']}, last heartbeat {status['heartbeat_age_s']:,.0f} s ago"
        )
    for start in status["starts"]:
        end = "no end recorded" if start.end is None else f"{start.end}, exit {start.exit_code}"
        lines.append(f"start {start.run_id}: {start.begin} to {end}")
    lines += [f"warning: {warning}" for warning in status["warnings"]]
    return "\n".join(map(printable, lines))
