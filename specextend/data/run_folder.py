"""The output folder of a run: where each file is, the records of the run's starts, and the record of its end."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from specextend.data.storage import Location, delete, list_files, read_bytes, write_bytes

SUMMARIES, ERRORS = "summaries", "errors"
"""The folders of the results, each with one file per input file."""


def records_folder(output: Location) -> Location:
    """Return the folder of everything that a run needs to go on."""
    return output.child("_run")


def manifest_file(output: Location) -> Location:
    """Return the place of the manifest."""
    return output.child("_run", "manifest.json")


def lock_file(output: Location) -> Location:
    """Return the place of the lock, without the output's gate: the lock is what the gate asks."""
    return Location(output.filesystem, output.child("_run", "lock").path)


def parts_folder(output: Location) -> Location:
    """Return the folder of the commits."""
    return output.child("_run", "parts")


def audits_folder(output: Location) -> Location:
    """Return the folder of the audit's rows."""
    return output.child("_run", "audits")


def starts_folder(output: Location) -> Location:
    """Return the folder of the records of starts."""
    return output.child("_run", "attempts")


def copies_folder(output: Location) -> Location:
    """Return the folder of the copies of input files with large row groups."""
    return output.child("_run", "input")


def summaries_folder(output: Location) -> Location:
    """Return the folder of the summaries."""
    return output.child(SUMMARIES)


def errors_folder(output: Location) -> Location:
    """Return the folder of the error rows."""
    return output.child(ERRORS)


def report_file(output: Location, ending: str) -> Location:
    """Return the place of the report. ending: `json` or `md`."""
    return output.child(f"report.{ending}")


def success_file(output: Location) -> Location:
    """Return the place of `_SUCCESS`."""
    return output.child("_SUCCESS")


def result_name(number: int) -> str:
    """Return the name that the results of input file `number` have in either folder."""
    return f"part-{number:05d}.parquet"


def is_result_name(name: str) -> bool:
    """Return True for a name that `result_name` gives."""
    return re.fullmatch(r"part-\d{5,}\.parquet", name) is not None


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


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run. A field is None if the record does not contain it."""

    run_id: str
    begin: str | None
    end: str | None
    exit_code: int | None
    versions: dict[str, str] | None
    charges: dict[str, Any] = field(default_factory=dict)
    """Documents that the start had charged with an attempt, as the driver wrote them."""
    damage: str | None = None
    """The reason why the record cannot be read; then only the run id is known, from the file's name."""


def read_starts(output: Location) -> list[Start]:
    """Read the record of every start, oldest first; damaged ones come last and do not affect the others."""
    folder = starts_folder(output)
    contents = ((name, read_bytes(folder.child(name))) for name in list_files(folder) if name.endswith(".json"))
    starts = [_parse(name.removesuffix(".json"), content) for name, content in contents if content is not None]
    return sorted(starts, key=lambda start: (start.damage is not None, str(start.begin)))


def _parse(name: str, content: bytes) -> Start:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Start(name, None, None, None, None, damage=f"it is not JSON ({error})")
    if not isinstance(record, dict):
        return Start(name, None, None, None, None, damage="it is not a JSON object")
    return Start(
        run_id=_typed(record.get("run_id"), str) or name,
        begin=_typed(record.get("begin"), str),
        end=_typed(record.get("end"), str),
        exit_code=_typed(record.get("exit_code"), int),
        versions=_versions(record.get("versions")),
        charges=_typed(record.get("charges"), dict) or {},
    )


def _typed(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _versions(value: Any) -> dict[str, str] | None:
    return {name: str(version) for name, version in value.items()} if isinstance(value, dict) else None
