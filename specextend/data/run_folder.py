"""The output folder of a run: places of its files, records of its starts and of its end."""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, FiniteFloat, TypeAdapter

from specextend.core import Values, counted, one_line
from specextend.data.storage import (
    Location,
    delete,
    exists,
    is_folder,
    list_files,
    list_folders,
    read_parsed,
    write_bytes,
)

Record = TypeVar("Record")
Retry = Literal["none", "retryable", "all"]
SUMMARIES = "summaries"
ERRORS = "errors"
ADDED = "added"
"""Folder with runs of tasks added after the end."""
REDONE = "redone"
"""Folder with runs that redid some rows."""


def _place(*names: str) -> Callable[[Location], Location]:
    return lambda output: output.child(*names)


records_folder = _place("_run")
manifest_file = _place("_run", "manifest.json")


def lock_file(output: Location) -> Location:
    """Return the place of the lock, without a gate, because the gate checks the lock."""
    return Location(output.filesystem, output.child("_run", "lock").path)


commits_folder = _place("_run", "parts")
audit_file = _place("audit.json")
starts_folder = _place("_run", "attempts")
selection_file = _place("_run", "selection.parquet")
summaries_folder = _place(SUMMARIES)
errors_folder = _place(ERRORS)


def report_file(output: Location, ending: str) -> Location:
    """Return the place of the report; `ending` is `json` or `html`."""
    return output.child(f"report.{ending}")


success_file = _place("_SUCCESS")


def run_folders(output: Location) -> list[Location]:
    """Return the folders written only by the driver."""
    folders = (records_folder, summaries_folder, errors_folder, commits_folder, starts_folder)
    return [output, *(folder(output) for folder in folders)]


def check_kinds(output: Location) -> None:
    """Raise ValueError if a file stands in place of a folder of the run, or vice versa.

    Symbolic links are refused: cleaning up would delete files elsewhere.
    """
    if not output.is_local:
        return
    folders = run_folders(output)[1:]
    files = [each(output) for each in (manifest_file, lock_file, selection_file, success_file)]
    files += [report_file(output, ending) for ending in ("json", "html")]
    _refuse_links(folders)
    for place in folders + files:
        right = "folder" if place in folders else "file"
        if exists(place) and is_folder(place) != (place in folders):
            raise ValueError(
                f"{place.path} must be a {right} of the run; move it away, or give another "
                "output.path"
            )


def _refuse_links(folders: list[Location]) -> None:
    for place in folders:
        if place.is_local and os.path.islink(place.path):
            raise ValueError(
                f"{place.path} is a symbolic link; put a folder there, or give another output.path"
            )


def inner_run(output: Location, folder: str, name: str) -> Location:
    """Return a run in `folder` (ADDED or REDONE). Raises ValueError for a symbolic link."""
    place = output.child(folder, name)
    _refuse_links([place.parent, place])
    return place


def inner_runs(output: Location, folder: str) -> list[Location]:
    """List the runs in `folder`. Raises ValueError for a symbolic link."""
    return [inner_run(output, folder, name) for name in list_folders(output.child(folder))]


def check_results(output: Location, num_files: int) -> None:
    """Raise ValueError for foreign files named like results, which readers would include."""
    names = {result_name(number) for number in range(num_files)}
    for folder in (summaries_folder(output), errors_folder(output)):
        for name in list_results(folder):
            if name not in names:
                raise ValueError(
                    f"{folder.child(name).path} is not of this run, which has "
                    f"{counted(num_files, 'input file')}: move it out of {folder.name}/"
                )


def result_name(number: int) -> str:
    """Return the name of both result files of input file `number`."""
    return f"part-{number:05d}.parquet"


def list_results(folder: Location) -> list[str]:
    """List the result files in a folder by number."""
    return [name for name in list_files(folder) if re.fullmatch(r"part-\d{5,}\.parquet", name)]


@dataclass(frozen=True)
class Counts:
    """Numbers of input rows."""

    rows: int
    done: int
    errors: int


def write_success(output: Location, counts: Counts) -> None:
    """Write `_SUCCESS`, the last file of a run with exit code 0."""
    write_bytes(success_file(output), (json.dumps(asdict(counts)) + "\n").encode())


def remove_success(output: Location) -> None:
    """Delete `_SUCCESS` before anything in the folder changes."""
    delete(success_file(output))


def read_success(output: Location) -> Counts | None:
    """Return the counts of a finished run; None without a valid `_SUCCESS`."""
    return _read_valid(success_file(output), Counts)


def _read_valid(location: Location, kind: type[Record]) -> Record | None:
    with suppress(ValueError):
        return read_parsed(location, partial(TypeAdapter(kind).validate_json, strict=True))
    return None


def write_audit(output: Location, found: Values) -> None:
    """Write the result of an audit."""
    write_bytes(audit_file(output), (json.dumps(found, indent=2) + "\n").encode())


def read_audit(output: Location) -> Values | None:
    """Return the result of the last audit; None if missing or invalid."""
    return _read_valid(audit_file(output), Values)


def parse_record(kind: type[Record], data: bytes) -> Record | None:
    """Parse a JSON object; None if invalid."""
    with suppress(ValueError):
        return TypeAdapter(kind).validate_json(data, strict=True)
    return None


def time_text(seconds: float) -> str:
    """Format seconds since the epoch as ISO 8601 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def parse_time(text: Any) -> float | None:
    """Parse ISO 8601 (default zone: UTC) to seconds since the epoch; None if invalid."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


_Time = Annotated[float, BeforeValidator(parse_time)]
"""Seconds since the epoch, stored as ISO 8601."""
RELEASED = "released"
"""Reason of a worker's end: no more work, or the start stopped."""


@dataclass(frozen=True)
class Kernel:
    """Outcome of trying a kernel."""

    name: str
    taken: bool
    why: str


@dataclass(frozen=True)
class WorkerRecord:
    """A worker of a start, as seen by the driver. Times are seconds since the epoch, or None."""

    worker: str
    """Name given by the driver, such as `worker-3`."""
    seat: Annotated[int, Field(ge=0, lt=1 << 31)]
    """Number, from 1, of the place that successors inherit."""
    asked: _Time
    begun: _Time | None
    """Start of the process, and of the use of resources."""
    ready: _Time | None
    gone: _Time | None
    reason: str | None
    name: str | None = None
    """`host:pid`, as in the column `worker`; None until ready."""
    device: str | None = None
    limits: dict[str, float] | None = None
    """Measured limits of the device and demands of the target; None if not loaded."""
    kernels: tuple[Kernel, ...] = ()
    used_gib: FiniteFloat | None = None
    """Peak memory at the end of a document; None before the first."""
    speedup: FiniteFloat | None = None
    """Speed with drafts over plain decoding in the last trial; None without a trial."""


@dataclass(frozen=True)
class Heartbeat:
    """Sign of life of a driver, stored in its lock."""

    run_id: str
    heartbeat: Annotated[float, Field(ge=0, lt=1e11)]
    """Seconds since the epoch, before the year 5138."""


@dataclass(frozen=True)
class Start:
    """A start of a run. Fields missing in the record are None."""

    run_id: str
    begin: str | None = None
    end: str | None = None
    exit_code: int | None = None
    versions: dict[str, str] | None = None
    charges: Values = field(default_factory=dict)
    """Documents charged with an attempt, as written by the driver."""
    seen: _Time | None = None
    """Time of the last write, in seconds since the epoch."""
    workers: tuple[WorkerRecord, ...] | None = None
    planned_gib: FiniteFloat | None = None
    gpus_per_worker: FiniteFloat | None = None
    price_per_worker_hour: FiniteFloat | None = None
    git_commit: str | None = None
    took_over: Heartbeat | None = None
    """Last heartbeat of a dead driver whose lock was taken over."""
    damage: str | None = None
    """Reason why the record cannot be read. Then only the run id is known."""


_START = TypeAdapter(Start)


def read_starts(output: Location) -> list[Start]:
    """Read the records of all starts, oldest first, damaged ones last."""
    folder = starts_folder(output)
    names = [name for name in list_files(folder) if name.endswith(".json")]
    starts = filter(None, (_read_start(folder.child(name)) for name in names))
    return sorted(starts, key=lambda start: (start.damage is not None, str(start.begin)))


def _read_start(location: Location) -> Start | None:
    name = location.name.removesuffix(".json")
    try:
        return read_parsed(location, lambda content: _parse(content, name))
    except ValueError as error:
        return Start(name, damage=f"it is not the record of a start ({error})")


def read_heartbeat(output: Location) -> Heartbeat | None:
    """Return the heartbeat in the lock; None without a valid lock."""
    return _read_valid(lock_file(output), Heartbeat)


def _parse(content: bytes, name: str) -> Start:
    try:
        return parse_start(json.loads(content), name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {one_line(error)}") from error


def parse_start(record: Values, name: str) -> Start:
    """Parse the record of a start, stored under `name`. Raises ValueError and others if invalid."""
    job = record.get("job") or {}
    report = record.get("report") or {}
    workers = [
        worker | ({"name": f"{worker['host']}:{worker['pid']}"} if worker.get("pid") else {})
        for worker in record.get("workers") or ()
    ]
    known = {
        "gpus_per_worker": job.get("gpus_per_worker"),
        "price_per_worker_hour": report.get("price_per_worker_hour"),
        "workers": workers if record.get("seen") else None,
    }
    return _START.validate_python({"run_id": name} | record | known)
