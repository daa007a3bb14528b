"""Append-only commits: the only record of what is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specextend.core import DocumentKey
from specextend.data.storage import Location


class PartWriter:
    """Commits rows to `_run/parts/part-<run id>-<seq>.parquet`; one writer per output folder, which holds its lock.

    `seq` continues after the highest in the folder, so the order of commits over all runs is the order of
    (seq, run id): that is what "later" means.
    """

    def __init__(self, output: Location, run_id: str) -> None:
        raise NotImplementedError

    def commit(self, rows: Sequence[dict[str, Any]]) -> str | None:
        """Write `rows` (of `result_row` and `error_row`) whole or not at all; returns the part's name, None for no rows."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Progress:
    """What the parts of an output folder hold."""

    done: frozenset[DocumentKey]
    errors: dict[DocumentKey, str]
    """Rows given up and not done since: key -> error_class of the latest."""


def read_parts(output: Location) -> Progress:
    """Read the keys of every part. Done beats error, later beats earlier; no parts is an empty progress."""
    raise NotImplementedError


def list_parts(output: Location) -> list[str]:
    """Names of the parts in the order of their commits."""
    raise NotImplementedError


def pending(source_rows: Iterable[int], progress: Progress, retry_errors: bool = False) -> Iterable[DocumentKey]:
    """Keys still to do, in key order. source_rows: rows of each input file."""
    raise NotImplementedError
