"""The end of a run: parts become summaries and errors in input order, and every row is accounted for."""

from __future__ import annotations

from dataclasses import dataclass

from specextend.data.documents import Source
from specextend.data.storage import Location


class ReconciliationError(RuntimeError):
    """Rows in are not rows done plus errors: nothing is written."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows in = done + errors."""

    rows: int
    done: int
    errors: int


def finalize(source: Source, output: Location) -> Counts:
    """Write `summaries/` and `errors/` from the parts, one row per document in input order.

    Bounded memory; each file is there whole or not at all; one that would not change is not rewritten; an errors
    file whose rows are done by now is deleted. Pass the source of `open_source` (passthrough columns are read from
    the input itself). Raises ReconciliationError.
    """
    raise NotImplementedError


def write_success(output: Location, counts: Counts) -> None:
    """Write `_SUCCESS`, the last file of a run that exits 0."""
    raise NotImplementedError


def remove_success(output: Location) -> None:
    """Remove `_SUCCESS` before anything in the folder changes."""
    raise NotImplementedError


def read_success(output: Location) -> Counts | None:
    """The counts of a finished run, or None."""
    raise NotImplementedError
