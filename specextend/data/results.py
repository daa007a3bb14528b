"""The result that counts for each input row, found in one pass over the commits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specextend.core import DocumentKey
from specextend.data.in_order import in_order
from specextend.data.parts import (
    KEY_COLUMNS,
    ORIGIN,
    DamagedPartError,
    commit_order,
    list_parts,
    part_sizes,
    read_part,
    recorded_fingerprint,
    run_id_of,
)
from specextend.data.run_folder import parts_folder
from specextend.data.schema import ERROR_SCHEMA
from specextend.data.storage import Location

Retry = Literal["none", "retryable", "all"]
"""The error rows that are done again."""
MOST_BYTES = 64 << 20
"""Bytes of parts, as they are stored, that are read ahead; in memory they take a few times as much."""
_MOST_ROWS = 1 << 32
"""No input file has so many rows."""
_ERROR_COLUMNS = {*KEY_COLUMNS, *ORIGIN, *ERROR_SCHEMA.names}
_OPEN, _FAILED, _DONE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run, as the parts of its output folder record it."""

    done: frozenset[DocumentKey]
    errors: dict[DocumentKey, str]
    """Error rows that are not done: key -> error_class of the latest result."""
    final: frozenset[DocumentKey] = frozenset()
    """Those of `errors` that would fail again, because their latest result is not retryable."""
    attempts: dict[DocumentKey, int] = field(default_factory=dict)
    """Attempts of `errors`: key -> attempts of the latest result."""


def read_parts(output: Location, fingerprint: str = "") -> Progress:
    """Read the keys of every part; without parts the progress is empty.

    fingerprint: that of the run to which the parts must belong; if empty, that of the folder's manifest.
    """
    done: set[DocumentKey] = set()
    errors: dict[DocumentKey, str] = {}
    final: set[DocumentKey] = set()
    attempts: dict[DocumentKey, int] = {}
    for table in read_results(output, (*KEY_COLUMNS, "retryable", "attempts"), fingerprint):
        keys = map(DocumentKey, table["file"].to_pylist(), table["row"].to_pylist())
        if table["error_class"].null_count:
            done.update(keys)
            continue
        for key, row in zip(keys, table.to_pylist(), strict=True):
            errors[key] = row["error_class"]
            attempts[key] = row["attempts"] or 0
            if not row["retryable"]:
                final.add(key)
    return Progress(frozenset(done), errors, frozenset(final), attempts)


def pending(
    file_rows: Sequence[int],
    progress: Progress,
    *,
    retry_errors: Retry = "none",
    chosen: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[DocumentKey]:
    """Yield the keys to do, in order.

    file_rows: rows of each input file. retry_errors: the error rows to redo. chosen: gives the rows that are wanted of
    a file, by its number; without it all are.
    """
    closed = {"none": progress.errors.keys(), "retryable": progress.final, "all": set[DocumentKey]()}[retry_errors]
    for file, num_rows in enumerate(file_rows):
        for row in range(num_rows) if chosen is None else chosen(file):
            key = DocumentKey(file, row)
            if key not in progress.done and key not in closed:
                yield key


def read_results(output: Location, columns: Sequence[str], fingerprint: str = "") -> Iterator[pa.Table]:
    """Yield the results that count as tables of `columns`, in which the KEY_COLUMNS must be; each part is read once.

    Done beats error, later beats earlier, and each input row has one result. A table holds rows done, or error rows:
    first come those done, the latest commits first, then the error rows in the order of their commits. Memory: the
    parts read ahead (MOST_BYTES), the error rows' own columns, and a byte for each input row. fingerprint: as for
    `read_parts`. Raises DamagedPartError and StrangePartError.
    """
    sizes = part_sizes(output)
    fingerprint = fingerprint or recorded_fingerprint(output)
    read = partial(_read, output, columns, fingerprint, sizes)
    settled, failed = _Settled(), list[tuple[str, pa.Table]]()
    names = list(reversed(sizes))
    tables = in_order(read, names, cost=sizes.__getitem__, most=MOST_BYTES)
    for name, table in zip(names, tables, strict=True):
        path = parts_folder(output).child(name).path
        places = settled.places(table, path)
        is_done = table["error_class"].is_null().to_numpy()
        if len(done := settled.settle(places, is_done, _DONE)):
            yield table.take(pa.array(done))
        if len(errors := settled.settle(places, ~is_done, _FAILED)):
            own = table.select([column for column in columns if column in _ERROR_COLUMNS])
            failed.append((path, own.take(pa.array(errors))))
    while failed:
        path, own = failed.pop()
        own = own.filter(pa.array(settled.is_failed(settled.places(own, path))))
        if len(own):
            yield _with_nulls(own, columns, table.schema)


def latest(tables: Sequence[pa.Table]) -> pa.Table:
    """Join tables that are in the order of their commits, and keep the row that counts for each key, in that order."""
    table = pa.concat_tables(tables).unify_dictionaries()
    files, rows = (table[column].to_numpy() for column in ("file", "row"))
    order = np.lexsort((table["error_class"].is_null().to_numpy(), rows, files))  # stable: later commits stay behind
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (np.diff(files[order]) != 0) | (np.diff(rows[order]) != 0)
    return table.take(pa.array(np.sort(order[is_last])))


def _read(output: Location, columns: Sequence[str], fingerprint: str, sizes: dict[str, int], name: str) -> pa.Table:
    """Read a part, or the one into which it was merged since the parts were listed."""
    try:
        return read_part(output, name, columns, fingerprint, sizes[name])
    except FileNotFoundError:
        there = list_parts(output)
        later = [other for other in there if commit_order(other) > commit_order(name)]
        if name in there or not later:
            raise
        return read_part(output, later[0], columns, fingerprint)


def _with_nulls(table: pa.Table, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Add the columns that error rows do not have."""
    arrays = [
        table[name] if name in table.column_names else pa.nulls(len(table), schema.field(name).type) for name in columns
    ]
    return pa.table(arrays, schema=schema)


class _Settled:
    """Remembers for each input row whether a result that counts was seen: one that is done, or only a failed one."""

    def __init__(self) -> None:
        self._room = np.zeros(0, np.int64)
        self._begins = np.zeros(0, np.int64)
        self._states = np.zeros(0, np.uint8)

    def places(self, table: pa.Table, path: str) -> NDArray[np.int64]:
        """Return the place of each row's state [N], until the next call. path: of the part, for messages.

        Raises DamagedPartError.
        """
        files, rows = (table[column].to_numpy() for column in ("file", "row"))
        if not len(files):
            return np.zeros(0, np.int64)
        if min(files.min(), rows.min()) < 0 or rows.max() >= _MOST_ROWS:
            raise DamagedPartError(f"{path} is damaged (it names a row that no input has); delete it to go on")
        self._make_room(files, rows)
        return self._begins[files] + rows

    def settle(self, places: NDArray[np.int64], mask: NDArray[np.bool_], state: int) -> NDArray[np.int64]:
        """Give rows a state if theirs is less; return which of the masked ones got it, the last of equal ones."""
        chosen = np.flatnonzero(mask)
        chosen = chosen[self._states[places[chosen]] < state]
        _, last = np.unique(places[chosen][::-1], return_index=True)
        chosen = np.sort(chosen[::-1][last])
        self._states[places[chosen]] = state
        return chosen

    def is_failed(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows have failed and were not done, before or afterwards."""
        return self._states[places] == _FAILED

    def _make_room(self, files: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Make room for the highest row of each file, and for twice as many where there was too little."""
        room = np.zeros(max(len(self._room), int(files.max()) + 1), np.int64)
        room[: len(self._room)] = self._room
        needed = room.copy()
        np.maximum.at(needed, files, rows + 1)
        if np.array_equal(needed, self._room):
            return
        room = np.where(needed > room, 2 * needed, room)
        begins = np.cumsum(room) - room
        states = np.zeros(int(room.sum()), np.uint8)
        moved = begins[: len(self._room)] - self._begins
        states[np.arange(len(self._states)) + np.repeat(moved, self._room)] = self._states
        self._room, self._begins, self._states = room, begins, states


@dataclass(frozen=True, slots=True)
class Results:
    """Says where the results that count were committed, sorted by the keys of their rows; no text is held.

    files, rows, parts, offsets [N] int64; done [N] bool.
    """

    names: tuple[str, ...]
    """The parts with which they were committed, in that order; some may have been merged into others since."""
    files: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: NDArray[np.int64]
    """Index into `names`."""
    offsets: NDArray[np.int64]
    """Row in the part."""
    done: NDArray[np.bool_]

    def span(self, number: int) -> range:
        """Return the positions of an input file's rows."""
        begin, end = np.searchsorted(self.files, [number, number + 1])
        return range(int(begin), int(end))

    def run_ids(self, positions: NDArray[np.int64]) -> list[str]:
        """Return the run ids of the starts that committed the results at some positions, in the order of commits."""
        return list(dict.fromkeys(run_id_of(self.names[part]) for part in np.unique(self.parts[positions])))

    def digest(self, positions: NDArray[np.int64]) -> str:
        """Hash the places of the results at some positions; a commit never changes, so equal hashes mean equal rows."""
        used, local = np.unique(self.parts[positions], return_inverse=True)
        digest = hashlib.sha256("\n".join(self.names[part] for part in used).encode())
        for values in (local, self.offsets[positions], self.rows[positions]):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()


class ResultKeys:
    """Collects the places of results, table by table."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._columns: list[tuple[NDArray[np.int64], ...]] = []

    def add(self, table: pa.Table) -> None:
        """Add a table with the KEY_COLUMNS and ORIGIN."""
        numbers = (table[name].to_numpy() for name in ("file", "row", "origin_row"))
        done = table["error_class"].is_null().to_numpy()
        self._columns.append((*numbers, done, self._parts(table["origin"])))

    def _parts(self, origins: pa.ChunkedArray) -> NDArray[np.int64]:
        """Number the parts that a column names."""
        pieces = [np.zeros(0, np.int32)]
        for chunk in origins.chunks:
            known = [self._names.setdefault(name, len(self._names)) for name in chunk.dictionary.to_pylist()]
            pieces.append(np.array(known, np.int32)[chunk.indices.to_numpy()])
        return np.concatenate(pieces)

    def results(self) -> Results:
        """Return what was added, sorted."""
        names = sorted(self._names, key=commit_order)
        ranks = np.zeros(len(names), np.int32)
        ranks[[self._names[name] for name in names]] = np.arange(len(names))
        empty = tuple(np.zeros(0, kind) for kind in (np.int32, np.int64, np.int32, bool, np.int32))
        files, rows, offsets, done, parts = map(np.concatenate, zip(empty, *self._columns, strict=True))
        order = np.lexsort((rows, files))
        return Results(tuple(names), files[order], rows[order], ranks[parts[order]], offsets[order], done[order])


def find_results(output: Location) -> Results:
    """Find the result of each input row, without its text. Raises DamagedPartError, StrangePartError."""
    keys = ResultKeys()
    for table in read_results(output, (*KEY_COLUMNS, *ORIGIN)):
        keys.add(table)
    return keys.results()
