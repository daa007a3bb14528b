"""The output folder of a run: where each file is, the records of the run's starts, and the record
of its end.
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)

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
"""The error rows that are done again."""
SUMMARIES = "summaries"
ERRORS = "errors"
"""The folders of the results, each with one file per input file."""
ADDED = "added"
"""Folder of a run that holds runs of tasks which it was asked once it had ended."""
REDONE = "redone"
"""Folder of a run that holds runs which did some of its rows again."""


def _place(*names: str) -> Callable[[Location], Location]:
    """Return what finds a place in an output folder."""
    return lambda output: output.child(*names)


records_folder = _place("_run")
"""The folder of everything that a run needs to go on."""
manifest_file = _place("_run", "manifest.json")
"""The place of the manifest."""


def lock_file(output: Location) -> Location:
    """Return the place of the lock, without the output's gate: the lock is what the gate asks."""
    return Location(output.filesystem, output.child("_run", "lock").path)


commits_folder = _place("_run", "parts")
"""The folder of the commits."""
audit_file = _place("audit.json")
"""The place of the last audit."""
starts_folder = _place("_run", "attempts")
"""The folder of the records of starts."""
selection_file = _place("_run", "selection.parquet")
"""The place of the rows that a run is about, if it leaves out what earlier runs have done."""
summaries_folder = _place(SUMMARIES)
"""The folder of the summaries."""
errors_folder = _place(ERRORS)
"""The folder of the error rows."""


def report_file(output: Location, ending: str) -> Location:
    """Return the place of the report. ending: `json` or `html`."""
    return output.child(f"report.{ending}")


success_file = _place("_SUCCESS")
"""The place of `_SUCCESS`."""


def run_folders(output: Location) -> list[Location]:
    """Return the run's folder and those in it, which only its driver writes to."""
    folders = (records_folder, summaries_folder, errors_folder, commits_folder, starts_folder)
    return [output, *(folder(output) for folder in folders)]


def check_kinds(output: Location) -> None:
    """Raise ValueError if a file stands where the run has a folder, or the other way round; object
    stores have none.

    A symbolic link to a folder is none: what lies elsewhere would be written to, and lose its
    temporary files.
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
    """Return the place of a run in `folder` of another run: ADDED or REDONE. Raises ValueError if
    it leads elsewhere, as `check_kinds` does.
    """
    place = output.child(folder, name)
    _refuse_links([place.parent, place])
    return place


def inner_runs(output: Location, folder: str) -> list[Location]:
    """List the runs in `folder` of another run. Raises ValueError as `inner_run` does."""
    return [inner_run(output, folder, name) for name in list_folders(output.child(folder))]


def check_results(output: Location, num_files: int) -> None:
    """Raise ValueError for a file that has the name of a result and is none of so many input
    files': who reads the folder would take its rows for the run's.
    """
    names = {result_name(number) for number in range(num_files)}
    for folder in (summaries_folder(output), errors_folder(output)):
        for name in list_results(folder):
            if name not in names:
                raise ValueError(
                    f"{folder.child(name).path} is not of this run, which has "
                    f"{counted(num_files, 'input file')}: move it out of {folder.name}/"
                )


def result_name(number: int) -> str:
    """Return the name that the results of input file `number` have in either folder."""
    return f"part-{number:05d}.parquet"


def list_results(folder: Location) -> list[str]:
    """List the files of `summaries/` or `errors/` by their number, without those of others."""
    return [name for name in list_files(folder) if re.fullmatch(r"part-\d{5,}\.parquet", name)]


@dataclass(frozen=True)
class Counts:
    """Rows of the input, which are those done and those that failed."""

    rows: int
    done: int
    errors: int


def write_success(output: Location, counts: Counts) -> None:
    """Write `_SUCCESS`, the last file of a run that exits 0."""
    write_bytes(success_file(output), (json.dumps(asdict(counts)) + "\n").encode())


def remove_success(output: Location) -> None:
    """Remove `_SUCCESS` before anything in the folder changes."""
    delete(success_file(output))


def read_success(output: Location) -> Counts | None:
    """Read the counts of a finished run; None if there is no `_SUCCESS`, or none that holds
    them.
    """
    return _read_valid(success_file(output), Counts)


def _read_valid(location: Location, kind: type[Record]) -> Record | None:
    """Read a small record; None if there is none, or one that does not hold what it should."""
    with suppress(ValueError):
        return read_parsed(location, partial(TypeAdapter(kind).validate_json, strict=True))
    return None


def write_audit(output: Location, found: Values) -> None:
    """Write what an audit has found, where reports look for it."""
    write_bytes(audit_file(output), (json.dumps(found, indent=2) + "\n").encode())


def read_audit(output: Location) -> Values | None:
    """Read what the last audit has found; None if there is none, or none that can be read."""
    return _read_valid(audit_file(output), Values)


def parse_record(kind: type[Record], data: bytes) -> Record | None:
    """Parse a record that is one JSON object; None for anything else. Fields that it has beside are
    passed over.
    """
    with suppress(ValueError):
        return TypeAdapter(kind).validate_json(data, strict=True)
    return None


def time_text(seconds: float) -> str:
    """Write seconds since the epoch as ISO 8601 in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def parse_time(text: Any) -> float | None:
    """Parse ISO 8601 to seconds since the epoch; None for what is no time. Without a zone it is
    UTC.
    """
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class _FileFacts:
    size: NonNegativeInt
    rows: NonNegativeInt
    footer_sha256: str


@dataclass(frozen=True)
class _Selected:
    rows: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class _Identity:
    files: dict[str, _FileFacts]
    hashes: dict[str, str]
    config: Values
    selection: _Selected | None = None


@dataclass(frozen=True)
class _Manifest:
    """The shape of `_run/manifest.json`, as `build_manifest` makes it. Fields that are not here may
    hold anything.
    """

    version: int
    fingerprint: str
    identity: _Identity
    config: dict[str, Values | None]
    models: dict[str, dict[str, str | None]] = field(default_factory=dict)
    modified_ns: dict[str, int | None] = field(default_factory=dict)
    selection: dict[str, NonNegativeInt] | None = None


_MANIFEST = TypeAdapter(_Manifest)
_Time = Annotated[float, BeforeValidator(parse_time)]
"""Seconds since the epoch, in a record as ISO 8601."""
RELEASED = "released"
"""The reason in the record of a worker that was ended because its start had no more work for it, or
stopped.
"""


@dataclass(frozen=True)
class Kernel:
    """Says what came of a kernel that a worker has tried."""

    name: str
    taken: bool
    why: str


@dataclass(frozen=True)
class WorkerRecord:
    """One worker of a start, as its driver saw it. Times are seconds since the epoch; None if that
    never happened.
    """

    worker: str
    """Name that the driver gave it, such as `worker-3`."""
    seat: Annotated[int, Field(ge=0, lt=1 << 31)]
    """The place that a worker which dies leaves to its successor, from 1."""
    asked: _Time
    begun: _Time | None
    """When it had a process, and so the resources that it is paid for."""
    ready: _Time | None
    """When its models were loaded."""
    gone: _Time | None
    reason: str | None
    name: str | None = None
    """`host:pid`, which the column `worker` of its rows holds; None until it was ready."""
    device: str | None = None
    limits: dict[str, float] | None = None
    """What its device can do and what its target asks of it, as measured when it was loaded; None
    if it was not.
    """
    kernels: tuple[Kernel, ...] = ()
    """What came of each kernel that it tried."""
    used_gib: FiniteFloat | None = None
    """The most memory that it had used when a document of it was done; None if none was."""
    speedup: FiniteFloat | None = None
    """How many times as fast as plain decoding drafts made its last trial; None before the end of
    the first, and for trees of one size.
    """


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a driver, as its lock holds it."""

    run_id: str
    heartbeat: Annotated[float, Field(ge=0, lt=1e11)]
    """Seconds since the epoch, until the year 5138."""


@dataclass(frozen=True)
class Start:
    """One start of a run. A field is None if the record does not contain it."""

    run_id: str
    begin: str | None = None
    end: str | None = None
    exit_code: int | None = None
    versions: dict[str, str] | None = None
    charges: Values = field(default_factory=dict)
    """Documents that the start had charged with an attempt, as the driver wrote them."""
    seen: _Time | None = None
    """When the record was last written, in seconds since the epoch."""
    workers: tuple[WorkerRecord, ...] | None = None
    planned_gib: FiniteFloat | None = None
    """The memory that a worker was planned to take."""
    gpus_per_worker: FiniteFloat | None = None
    price_per_worker_hour: FiniteFloat | None = None
    git_commit: str | None = None
    took_over: Heartbeat | None = None
    """The last one of the dead driver whose lock this start took over."""
    damage: str | None = None
    """The reason why the record cannot be read; then only the run id is known, from the file's
    name.
    """


_START = TypeAdapter(Start)


def read_starts(output: Location) -> list[Start]:
    """Read the record of every start, oldest first; damaged ones come last and do not affect the
    others.
    """
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
    """Read the heartbeat that the lock holds; None without a lock that has one."""
    return _read_valid(lock_file(output), Heartbeat)


def _parse(content: bytes, name: str) -> Start:
    try:
        return parse_start(json.loads(content), name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(_wrong_with(error)) from error


def parse_manifest(content: bytes) -> Values:
    """Parse a manifest. Raises ValueError, in one line, for what has another shape."""
    try:
        _MANIFEST.validate_json(content, strict=True)
        return dict(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise ValueError(_wrong_with(error)) from error


def _wrong_with(error: Exception) -> str:
    """Say in one line what is wrong with a record: of several things the first."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return f"{type(error).__name__}: {one_line(error)}"


def parse_start(record: Values, name: str) -> Start:
    """Parse the record of a start. name: of the file, without `.json`. Raises ValueError, among
    others, for no such.
    """
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
