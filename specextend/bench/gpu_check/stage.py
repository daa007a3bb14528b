"""A stage of the check: what it is given, the rows that it yields, and the file that keeps them as they come."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Shapes = Literal["full", "tiny"]
Row = dict[str, Any]
NO_TIME = "no time is left"
_SHOWN = 1000
"""Characters of an error's message that are kept."""
_OUT_OF_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED")
"""Messages of torch, CUDA and its libraries."""


class SkippedError(Exception):
    """A stage, or a cell of one, that this machine cannot run; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Holds what every stage is given."""

    device: str
    """`cpu` or `cuda`."""
    shapes: Shapes
    """`full` are those of models in use; `tiny` ones run on a CPU in seconds."""
    out: Path
    """Folder of the JSON files, those of earlier stages included."""
    ends_at: float
    """Time of `time.monotonic` at which a stage begins nothing new."""

    @property
    def seconds_left(self) -> float:
        """Return the seconds in which the stage may still begin something."""
        return self.ends_at - time.monotonic()


Run = Callable[[Setting], Iterator[Row]]
"""A stage: yields rows of JSON values. A row with `wrong` says in words what is not as it must be."""


def run_stage(name: str, load: Callable[[], Run], setting: Setting) -> None:
    """Load a stage, run it to its end, and keep its rows and how it ended in `<name>.json`."""
    rows: list[Row] = []
    status, reason = "running", ""
    keep(setting.out, name, status, reason, rows)
    try:
        for row in load()(setting):
            rows.append(row)
            keep(setting.out, name, status, reason, rows)
        status = "ok"
    except SkippedError as error:
        status, reason = "skipped", str(error)
    except ModuleNotFoundError as error:
        status, reason = "skipped", f"the package {error.name} is not installed"
    except Exception as error:  # noqa: BLE001  whatever it is, the summary shall say it
        last = traceback.extract_tb(error.__traceback__)[-1]
        status, reason = "failed", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
    wrong = [row["wrong"] for row in rows if "wrong" in row]
    if wrong and status != "failed":
        status, reason = "failed", f"wrong rows: {len(wrong)}, the first: {wrong[0]}"
    keep(setting.out, name, status, reason, rows)


def attempt(setting: Setting, cell: Row, measure: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield the rows of one cell, each with what names it; if it fails, one more row says why, and the stage goes on.

    That time or memory runs out is not wrong: cells are tried up to the last that fits.
    """
    if setting.seconds_left <= 0:
        yield cell | {"skipped": NO_TIME}
        return
    try:
        for row in measure():
            yield cell | row
        return
    except SkippedError as error:
        last = {"skipped": str(error)}
    except Exception as error:  # noqa: BLE001  one kernel that fails must not cost the cells behind it
        last = {"wrong": f"{type(error).__name__}: {error}"[:_SHOWN]}
        if any(text in str(error) for text in _OUT_OF_MEMORY):
            last = {"skipped": "out of memory"}
    yield cell | last  # here the exception is released, and with it the tensors of the cell


def keep(out: Path, name: str, status: str, reason: str, rows: list[Row]) -> None:
    """Write a stage's file, whole or not at all."""
    write_json(out / f"{name}.json", {"stage": name, "status": status, "reason": reason, "rows": rows})


def write_json(path: Path, values: Row) -> None:
    """Write JSON to a file, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_rows(out: Path, name: str) -> list[Row]:
    """Read the rows of a stage that ran before; none if it left none."""
    path = out / f"{name}.json"
    if not path.is_file():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows
