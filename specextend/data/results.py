"""One result per input row, found among the parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specextend.data.parts import list_parts, read_part
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location

_WINDOW_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class Results:
    """Where the result of each row is: done beats error, later beats earlier. Sorted by key; no text is held.

    files, rows, parts, offsets [N] int64; done [N] bool.
    """

    output: Location
    names: tuple[str, ...]
    """The parts, in the order of their commits."""
    files: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: NDArray[np.int64]
    """Index into `names`."""
    offsets: NDArray[np.int64]
    """Row in the part."""
    done: NDArray[np.bool_]

    def span(self, number: int) -> range:
        """Positions of an input file's rows."""
        begin, end = np.searchsorted(self.files, [number, number + 1])
        return range(int(begin), int(end))

    def load(self, positions: NDArray[np.int64]) -> pa.Table:
        """The results at some positions, in that order, as rows of PART_SCHEMA. Reads each part concerned once."""
        parts = self.parts[positions]
        pieces, places = [PART_SCHEMA.empty_table()], [np.empty(0, np.int64)]
        for part in np.unique(parts):
            mine = np.flatnonzero(parts == part)
            table = read_part(self.output, self.names[part], PART_SCHEMA.names)
            pieces.append(table.take(pa.array(self.offsets[positions[mine]])))
            places.append(mine)
        return pa.concat_tables(pieces).take(pa.array(np.argsort(np.concatenate(places))))

    def digest(self, positions: NDArray[np.int64]) -> str:
        """A hash of which results stand at some positions; parts never change, so equal hashes mean equal rows."""
        used, local = np.unique(self.parts[positions], return_inverse=True)
        digest = hashlib.sha256("\n".join(self.names[part] for part in used).encode())
        for values in (local, self.offsets[positions], self.rows[positions]):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()


class Window:
    """Neighbouring results, loaded some thousands at a time: reading them in order reads a part few times."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._loaded = range(0)
        self._table = PART_SCHEMA.empty_table()

    def rows(self, begin: int, end: int) -> pa.Table:
        """The results at positions `begin` to `end`."""
        if begin < self._loaded.start or end > self._loaded.stop:
            stop = max(end, min(begin + _WINDOW_ROWS, len(self._results.rows)))
            self._loaded = range(begin, stop)
            self._table = self._results.load(np.arange(begin, stop))
        return self._table.slice(begin - self._loaded.start, end - begin)


def find_results(output: Location) -> Results:
    """Read the keys of all parts and choose one result for each."""
    names = tuple(list_parts(output))
    tables = [read_part(output, name, ["file", "row", "error_class"]) for name in names]
    files, rows = (_concatenate([table[column].to_numpy() for table in tables]) for column in ("file", "row"))
    parts = _concatenate([np.full(len(table), number) for number, table in enumerate(tables)])
    offsets = _concatenate([np.arange(len(table)) for table in tables])
    done = _concatenate([table["error_class"].is_null().to_numpy() for table in tables]).astype(bool)
    order = np.lexsort((offsets, parts, done, rows, files))
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (np.diff(files[order]) != 0) | (np.diff(rows[order]) != 0)
    best = order[is_last]
    return Results(output, names, files[best], rows[best], parts[best], offsets[best], done[best])


def _concatenate(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64)
