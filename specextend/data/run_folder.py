"""The output folder of a run: where each file is, the records of the run's starts, and the record of its end."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pyarrow.fs import FileType

from specextend.data.storage import Location, delete, list_files, read_bytes, write_bytes

SUMMARIES, ERRORS = "summaries", "errors"
"""The folders of the results, each with one file per input file."""
_MOST = 1e11
"""Bound of the numbers that a record may hold: as seconds since the epoch, the year 5138."""


def records_folder(output: Location) -> Location:
    """Return the folder of everything that a run needs to go on."""
    return output.child("_run")


def manifest_file(output: Location) -> Location:
    """Return the place of the manifest."""
    return output.child("_run", "manifest.json")


def lock_file(output: Location) -> Location:
    """Return the place of the lock, without the output's gate: the lock is what the gate asks."""
    return Location(output.filesystem, output.child("_run", "lock").path)


def commits_folder(output: Location) -> Location:
    """Return the folder of the commits."""
    return output.child("_run", "parts")


def audits_folder(output: Location) -> Location:
    """Return the folder of the audit's rows."""
    return output.child("_run", "audits")


def starts_folder(output: Location) -> Location:
    """Return the folder of the records of starts."""
    return output.child("_run", "attempts")


def selection_file(output: Location) -> Location:
    """Return the place of the rows that a run is about, if it leaves out what earlier runs have done."""
    return output.child("_run", "selection.parquet")


def summaries_folder(output: Location) -> Location:
    """Return the folder of the summaries."""
    return output.child(SUMMARIES)


def errors_folder(output: Location) -> Location:
    """Return the folder of the error rows."""
    return output.child(ERRORS)


def report_file(output: Location, ending: str) -> Location:
    """Return the place of the report. ending: `json`, `md` or `html`."""
    return output.child(f"report.{ending}")


def success_file(output: Location) -> Location:
    """Return the place of `_SUCCESS`."""
    return output.child("_SUCCESS")


def check_kinds(output: Location) -> None:
    """Raise ValueError if a file stands where the run has a folder, or the other way round; object stores have none."""
    if not output.is_local:
        return
    folders = [records_folder(output), summaries_folder(output), errors_folder(output)]
    folders += [each(output) for each in (commits_folder, audits_folder, starts_folder)]
    files = [each(output) for each in (manifest_file, lock_file, selection_file, success_file)]
    files += [report_file(output, ending) for ending in ("json", "md", "html")]
    for places, wrong, right in ((folders, FileType.File, "folder"), (files, FileType.Directory, "file")):
        for info in output.filesystem.get_file_info([place.path for place in places]):
            if info.type == wrong:
                raise ValueError(f"{info.path} must be a {right} of the run; move it away, or give another output.path")


def result_name(number: int) -> str:
    """Return the name that the results of input file `number` have in either folder."""
    return f"part-{number:05d}.parquet"


def is_result_name(name: str) -> bool:
    """Return True for a name that `result_name` gives."""
    return re.fullmatch(r"part-\d{5,}\.parquet", name) is not None


def list_results(folder: Location) -> list[str]:
    """List the files of `summaries/` or `errors/`, as paths below the folder, by their number."""
    names = (name for name in list_files(folder, recursive=True) if is_result_name(name.rpartition("/")[2]))
    return sorted(names, key=lambda name: name.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
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
    """Read the counts of a finished run; None if there is no `_SUCCESS`, or none that holds them."""
    try:
        counts = Counts(**json.loads(read_bytes(success_file(output)) or b""))
    except (ValueError, TypeError):
        return None
    return counts if all(isinstance(count, int) for count in asdict(counts).values()) else None


RELEASED = "released"
"""The reason in the record of a worker that was ended because its start had no more work for it, or stopped."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker of a start, as its driver saw it. Times are seconds since the epoch; None if that never happened."""

    worker: str
    """Name that the driver gave it, such as `worker-3`."""
    seat: int
    """The place that a worker which dies leaves to its successor, from 1."""
    asked: float
    begun: float | None
    """When it had a process, and so the resources that it is paid for."""
    ready: float | None
    """When its models were loaded."""
    gone: float | None
    reason: str | None
    name: str | None
    """`host:pid`, which the column `worker` of its rows holds; None until it was ready."""
    device: str | None
    limits: dict[str, float] | None = None
    """What its device can do and what its target asks of it, as measured when it was loaded; None if it was not."""
    kernels: tuple[dict[str, Any], ...] = ()
    """What came of each kernel that it tried: its `name`, whether it was `taken`, and `why`."""
    used_gib: float | None = None
    """The most memory that it had used when a document of it was done; None if none was."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run. A field is None if the record does not contain it."""

    run_id: str
    begin: str | None = None
    end: str | None = None
    exit_code: int | None = None
    versions: dict[str, str] | None = None
    charges: dict[str, Any] = field(default_factory=dict)
    """Documents that the start had charged with an attempt, as the driver wrote them."""
    seen: float | None = None
    """When the record was last written, in seconds since the epoch."""
    workers: tuple[WorkerRecord, ...] | None = None
    planned_gib: float | None = None
    """The memory that a worker was planned to take."""
    gpus_per_worker: float | None = None
    price_per_worker_hour: float | None = None
    git_commit: str | None = None
    took_over: tuple[str, float] | None = None
    """Run id and last heartbeat, in seconds since the epoch, of the dead driver whose lock this start took over."""
    damage: str | None = None
    """The reason why the record cannot be read; then only the run id is known, from the file's name."""


def read_starts(output: Location) -> list[Start]:
    """Read the record of every start, oldest first; damaged ones come last and do not affect the others."""
    folder = starts_folder(output)
    contents = ((name, read_bytes(folder.child(name))) for name in list_files(folder) if name.endswith(".json"))
    starts = [_parse(name.removesuffix(".json"), content) for name, content in contents if content is not None]
    return sorted(starts, key=lambda start: (start.damage is not None, str(start.begin)))


def read_heartbeat(output: Location) -> tuple[str, float] | None:
    """Read run id and heartbeat, in seconds since the epoch, that the lock holds; None without a lock that has them."""
    try:
        return _heartbeat(json.loads(read_bytes(lock_file(output)) or b""))
    except (ValueError, RecursionError):
        return None


def time_text(seconds: float) -> str:
    """Write seconds since the epoch as ISO 8601 in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def parse_time(text: Any) -> float | None:
    """Parse ISO 8601 to seconds since the epoch; None for what is no time. Without a zone it is UTC."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _parse(name: str, content: bytes) -> Start:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Start(name, damage=f"it is not JSON ({error})")
    if not isinstance(record, dict):
        return Start(name, damage="it is not a JSON object")
    return parse_start(record, name)


_START = {"begin": str, "end": str, "exit_code": int, "git_commit": str, "versions": dict}
_WORKER = {"worker": str, "seat": int, "reason": str, "device": str}
_TIMES = ("asked", "begun", "ready", "gone")


def parse_start(record: dict[str, Any], name: str) -> Start:
    """Parse the record of a start; what has another type than it should is None. name: of the file, without `.json`."""
    job, report = (_typed(record.get(section), dict) or {} for section in ("job", "report"))
    seen, workers = parse_time(record.get("seen")), _typed(record.get("workers"), list) or []
    found = (_worker(entry) for entry in workers if isinstance(entry, dict))
    return Start(
        run_id=_typed(record.get("run_id"), str) or name,
        **{name: _typed(record.get(name), kind) for name, kind in _START.items()},
        charges=_typed(record.get("charges"), dict) or {},
        seen=seen,
        workers=None if seen is None else tuple(worker for worker in found if worker is not None),
        planned_gib=_number(record.get("planned_gib")),
        gpus_per_worker=_number(job.get("gpus_per_worker")),
        price_per_worker_hour=_number(report.get("price_per_worker_hour")),
        took_over=_heartbeat(record.get("took_over")),
    )


def _worker(entry: dict[str, Any]) -> WorkerRecord | None:
    """Parse a worker of a record; None without a name, a seat or a beginning."""
    facts = {name: _typed(entry.get(name), kind) for name, kind in _WORKER.items()}
    times: dict[str, Any] = {name: parse_time(entry.get(name)) for name in _TIMES}
    if None in (facts["worker"], facts["seat"], times["asked"]):
        return None
    host, pid = _typed(entry.get("host"), str), _typed(entry.get("pid"), int)
    limits = _typed(entry.get("limits"), dict) or {}
    return WorkerRecord(
        **facts,
        **times,
        name=None if host is None or pid is None else f"{host}:{pid}",
        limits=limits if limits and all(_is_measured(value) for value in limits.values()) else None,
        used_gib=_number(entry.get("used_gib")),
        kernels=tuple(kernel for kernel in _typed(entry.get("kernels"), list) or () if _is_kernel(kernel)),
    )


def _heartbeat(value: Any) -> tuple[str, float] | None:
    """Parse the run id and the heartbeat of a lock."""
    if not isinstance(value, dict):
        return None
    run_id, heartbeat = _typed(value.get("run_id"), str), _number(value.get("heartbeat"))
    return None if run_id is None or heartbeat is None else (run_id, heartbeat)


def _typed(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _is_kernel(value: Any) -> bool:
    names = {"name": str, "taken": bool, "why": str}
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in names.items())


def _is_measured(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _number(value: Any) -> float | None:
    """Return a number that a clock or a price may show; None for anything else, such as NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST else None
