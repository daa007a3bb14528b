"""The status of a run, read from its output folder while it runs and afterwards."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.lock import read_lock
from specextend.core import printable
from specextend.data.fingerprint import num_input_rows, read_manifest
from specextend.data.parts import read_parts
from specextend.data.run_folder import Start, lock_file, read_starts, read_success, success_file
from specextend.data.storage import Location, exists

_UNITS = ((1, "s"), (60, "min"), (3600, "h"), (86400, "days"))


def read_status(output: Location) -> dict[str, Any]:
    """Read state, rows and starts. Raises ValueError, in one line, if there is no run or its rows cannot be counted.

    Any other record (the lock, a start, `_SUCCESS`) may be damaged, which becomes one of the `warnings`.
    """
    manifest, driver = read_manifest(output), _read_driver(output)
    if manifest is None:
        if driver.is_alive:
            raise ValueError(f"{output.path} holds no run yet: {driver.name} is reading its input")
        raise ValueError(f"{output.path} holds no run (there is no _run/manifest.json)")
    progress, starts = read_parts(output), read_starts(output)
    num_rows = num_input_rows(manifest)
    num_left = num_rows - len(progress.done) - len(progress.errors)
    is_complete, damage = _read_completion(output)
    return {
        "state": _state(driver, is_complete, starts, num_left),
        "rows": num_rows,
        "done": len(progress.done),
        "errors": len(progress.errors),
        "errors_by_class": dict(Counter(progress.errors.values()).most_common()),
        "left": num_left,
        "driver": driver.name,
        "heartbeat_age_s": driver.heartbeat_age_s,
        "fingerprint": manifest["fingerprint"],
        "starts": [start for start in starts if start.damage is None],
        "warnings": [*driver.warnings, *damage, *_damaged(starts)],
    }


def describe_status(status: dict[str, Any]) -> str:
    """Describe the status for people. No text from a record can add a line of its own."""
    lines = [
        f"{status['state']}: {status['done']} of {status['rows']} rows done, {status['errors']} failed, "
        f"{status['left']} left",
    ]
    lines += [f"errors: {count} {name}" for name, count in status["errors_by_class"].items()]
    if status["driver"]:
        lines.append(f"driver: {status['driver']}, last heartbeat {describe_age(status['heartbeat_age_s'])}")
    for start in status["starts"]:
        end = "no end recorded" if start.end is None else f"{start.end}, exit {start.exit_code}"
        lines.append(f"start {start.run_id}: {start.begin} to {end}")
    lines += [f"warning: {warning}" for warning in status["warnings"]]
    return "\n".join(map(printable, lines))


def describe_age(seconds: float) -> str:
    """Describe how long ago something happened, by a clock that may differ from ours."""
    if not math.isfinite(seconds) or abs(seconds) >= 1000 * 365 * 86400:
        return "at no time that a clock shows"
    size, unit = max((each for each in _UNITS if abs(seconds) >= 2 * each[0]), default=_UNITS[0])
    count = round(abs(seconds) / size)
    return f"{count} {unit} in the future: its clock differs" if seconds < 0 and count else f"{count} {unit} ago"


@dataclass(frozen=True, slots=True)
class _Driver:
    """The facts about the driver that the lock contains."""

    name: str | None = None
    heartbeat_age_s: float | None = None
    is_alive: bool = False
    warnings: tuple[str, ...] = ()


def _read_driver(output: Location) -> _Driver:
    now, holder = time.time(), read_lock(output)
    if holder is not None:
        return _Driver(str(holder), now - holder.heartbeat, holder.seems_alive(now))
    if exists(lock_file(output)):
        return _Driver(warnings=("_run/lock cannot be read; if no driver is running, delete it",))
    return _Driver()


def _read_completion(output: Location) -> tuple[bool, list[str]]:
    """Return True if the run has written `_SUCCESS`, and a warning if that cannot be read."""
    if read_success(output) is not None:
        return True, []
    is_damaged = exists(success_file(output))
    return False, ["_SUCCESS cannot be read; run again to write it anew"] if is_damaged else []


def _damaged(starts: list[Start]) -> list[str]:
    return [f"_run/attempts/{start.run_id}.json cannot be read: {start.damage}" for start in starts if start.damage]


def _state(driver: _Driver, is_complete: bool, starts: list[Start], num_left: int) -> str:
    if driver.is_alive:
        return "running"
    if is_complete:
        return "complete"
    last = next((start for start in reversed(starts) if start.damage is None), None)
    is_finished = last is not None and last.exit_code == EXIT_TOO_MANY_ERRORS and not num_left
    return "finished with errors" if is_finished else "stopped, run again to resume"
