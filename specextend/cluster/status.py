"""What an output folder says of its run, while it runs and after."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from specextend.cluster.attempts import read_attempts
from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.lock import read_lock
from specextend.data.finalize import read_success
from specextend.data.fingerprint import read_manifest
from specextend.data.parts import read_parts
from specextend.data.storage import Location


def read_status(output: Location) -> dict[str, Any]:
    """State, rows, starts. Raises ValueError where there is no run."""
    manifest = read_manifest(output)
    if manifest is None:
        if (holder := read_lock(output)) is not None and holder.is_alive(time.time()):
            raise ValueError(f"{output.path} holds no run yet: {holder} is reading its input")
        raise ValueError(f"{output.path} holds no run (there is no _run/manifest.json)")
    progress, holder, attempts = read_parts(output), read_lock(output), read_attempts(output)
    num_rows = sum(file["rows"] for file in manifest["identity"]["files"].values())
    return {
        "state": _state(output, attempts),
        "rows": num_rows,
        "done": len(progress.done),
        "errors": len(progress.errors),
        "errors_by_class": dict(Counter(progress.errors.values()).most_common()),
        "left": num_rows - len(progress.done) - len(progress.errors),
        "driver": str(holder) if holder is not None else None,
        "heartbeat_age_s": time.time() - holder.heartbeat if holder is not None else None,
        "fingerprint": manifest["fingerprint"],
        "starts": [{key: record[key] for key in ("run_id", "begin", "end", "exit_code")} for record in attempts],
    }


def describe_status(status: dict[str, Any]) -> str:
    """The status for people."""
    lines = [
        f"{status['state']}: {status['done']} of {status['rows']} rows done, {status['errors']} failed, "
        f"{status['left']} left",
    ]
    lines += [f"errors: {count} {name}" for name, count in status["errors_by_class"].items()]
    if status["driver"]:
        lines.append(f"driver: {status['driver']}, last heartbeat {status['heartbeat_age_s']:.0f} s ago")
    for start in status["starts"]:
        end = "no end recorded" if start["end"] is None else f"{start['end']}, exit {start['exit_code']}"
        lines.append(f"start {start['run_id']}: {start['begin']} to {end}")
    return "\n".join(lines)


def _state(output: Location, attempts: list[dict[str, Any]]) -> str:
    holder = read_lock(output)
    if holder is not None and holder.is_alive(time.time()):
        return "running"
    if read_success(output) is not None:
        return "complete"
    is_finished = bool(attempts) and attempts[-1]["exit_code"] == EXIT_TOO_MANY_ERRORS
    return "finished with errors" if is_finished else "stopped, run again to resume"
