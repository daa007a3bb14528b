"""Append-only commits: the only record of what is done."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import DocumentKey
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location, list_files, remove_temporary_files, write_bytes

_NAME = re.compile(r"part-(?P<run_id>[0-9a-f]{8})-(?P<seq>\d{6,})\.parquet")


class PartWriter:
    """Commits rows to `_run/parts/part-<run id>-<seq>.parquet`; one writer per output folder, which holds its lock.

    `seq` continues after the highest in the folder, so the order of commits over all runs is the order of
    (seq, run id): that is what "later" means. run_id: 8 hexadecimal digits.
    """

    def __init__(self, output: Location, run_id: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{8}", run_id):
            raise ValueError(f"a run id is 8 hexadecimal digits, got {run_id!r}")
        self.run_id = run_id
        self._folder = parts_folder(output)
        remove_temporary_files(self._folder)
        names = list_parts(output)
        self._next_seq = _order(names[-1])[0] + 1 if names else 0

    def commit(self, rows: Sequence[dict[str, Any]]) -> str | None:
        """Write rows of `result_row` and `error_row`, whole or not at all.

        Returns the part's name, None where there are no rows.
        """
        if not rows:
            return None
        name = f"part-{self.run_id}-{self._next_seq:06d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(list(rows), schema=PART_SCHEMA), sink, compression="zstd")
        write_bytes(self._folder.child(name), sink.getvalue())
        self._next_seq += 1
        return name


@dataclass(frozen=True, slots=True)
class Progress:
    """What the parts of an output folder hold."""

    done: frozenset[DocumentKey]
    errors: dict[DocumentKey, str]
    """Rows given up and not done: key -> error_class of the latest."""


def read_parts(output: Location) -> Progress:
    """Read the keys of every part. Done beats error, later beats earlier; no parts is an empty progress."""
    done: set[DocumentKey] = set()
    errors: dict[DocumentKey, str] = {}
    for name in list_parts(output):
        table = read_part(output, name, ["file", "row", "error_class"])
        columns = (table[column].to_pylist() for column in ("file", "row", "error_class"))
        for file, row, error_class in zip(*columns, strict=True):
            if error_class is None:
                done.add(DocumentKey(file, row))
            else:
                errors[DocumentKey(file, row)] = error_class
    return Progress(frozenset(done), {key: name for key, name in errors.items() if key not in done})


def pending(file_rows: Sequence[int], progress: Progress, *, retry_errors: bool = False) -> Iterator[DocumentKey]:
    """Keys still to do, in key order. file_rows: rows of each input file. retry_errors: error rows are to do again."""
    for file, num_rows in enumerate(file_rows):
        for row in range(num_rows):
            key = DocumentKey(file, row)
            if key not in progress.done and (retry_errors or key not in progress.errors):
                yield key


def parts_folder(output: Location) -> Location:
    """Where an output folder keeps its parts."""
    return output.child("_run", "parts")


def list_parts(output: Location) -> list[str]:
    """Names of the parts in the order of their commits."""
    return sorted((name for name in list_files(parts_folder(output)) if _NAME.fullmatch(name)), key=_order)


def read_part(output: Location, name: str, columns: Sequence[str]) -> pa.Table:
    """Columns of one part. Raises ValueError, naming it, for one that cannot be read: no writer of ours leaves such."""
    location = parts_folder(output).child(name)
    try:
        with location.filesystem.open_input_file(location.path) as file:
            return pq.read_table(file, columns=list(columns))
    except (pa.ArrowInvalid, KeyError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{location.path} is damaged ({message}); delete it to do its documents again") from error


def _order(name: str) -> tuple[int, str]:
    """(seq, run id) of a part's name."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match["seq"]), match["run_id"]
