"""Rows that come in any order, taken in the order of the input: sorted in memory, or on disk if there are many."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from specextend.core import first_line

BUFFER_BYTES = 128 << 20
"""Bytes of rows that are sorted in memory; if there are more, they go to a temporary file."""
_FILE_BITS = 32
"""A key is one number: that of the file, and in so many lower bits that of the row."""


def keys_of(files: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one number for each row [N], by which rows are sorted."""
    return (files.astype(np.int64) << _FILE_BITS) + rows


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring rows of the input that are taken at once: some whole files, or a part of a large one."""

    files: range
    first_row: int = 0
    """Row of the file with which it begins, if it is a part of one; whole files begin with row 0."""


def cut(file_rows: Iterable[Sequence[int]], most_rows: int) -> list[Window]:
    """Cut the input into windows of at most `most_rows`; only a file with more of them is in several windows.

    file_rows: numbers of the rows that are wanted of each file, in order.
    """
    windows: list[Window] = []
    begin = end = num_rows = 0
    for number, rows in enumerate(file_rows):
        end = number + 1
        if begin < number and num_rows + len(rows) > most_rows:
            windows.append(Window(range(begin, number)))
            begin, num_rows = number, 0
        if len(rows) > most_rows:
            windows += [Window(range(number, end), first) for first in rows[::most_rows]]
            begin = end
        else:
            num_rows += len(rows)
    if begin < end:
        windows.append(Window(range(begin, end)))
    return windows


class SortedRows:
    """Rows of one schema, added in any order and taken window by window in the order of the input.

    Holds `buffer_bytes` of rows and a sorted copy of them. More go to temporary files without a name, each of which has
    a batch for each window; the system removes them when the process ends, however it ends.
    """

    def __init__(self, schema: pa.Schema, windows: Sequence[Window], buffer_bytes: int = BUFFER_BYTES) -> None:
        """Take the schema, which has columns `file` and `row`, and the windows in which the rows will be taken."""
        self._schema, self._buffer_bytes = schema, buffer_bytes
        firsts = np.array([(window.files.start, window.first_row) for window in windows], np.int64).reshape(-1, 2)
        self._begins = keys_of(firsts[:, 0], firsts[:, 1])
        self._waiting: list[pa.Table] = []
        self._num_bytes = 0
        self._files: list[IO[bytes]] = []
        self._runs: list[Callable[[int], pa.Table]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> SortedRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files:
            file.close()

    def add(self, rows: pa.Table) -> None:
        """Add rows. Raises OSError if the temporary folder has no room."""
        self._waiting.append(rows.select(self._schema.names))
        self._num_bytes += rows.nbytes
        if self._num_bytes >= self._buffer_bytes:
            self._runs.append(self._stored(self._sorted()))

    def take(self, window: int) -> pa.Table:
        """Return the rows of a window, sorted; thread-safe. Nothing can be added any more."""
        with self._lock:
            if self._waiting:
                self._runs.append(self._sorted())
            tables = [run(window) for run in self._runs]
        table = pa.concat_tables([self._schema.empty_table(), *tables])
        return table.take(pa.array(np.argsort(_keys(table), kind="stable"))).combine_chunks()

    def _sorted(self) -> Callable[[int], pa.Table]:
        """Sort the rows that wait; return what gives those of a window."""
        table = pa.concat_tables(self._waiting)
        self._waiting, self._num_bytes = [], 0
        keys = _keys(table)
        order = np.argsort(keys, kind="stable")
        table = table.take(pa.array(order)).combine_chunks()
        ends = [*np.searchsorted(keys[order], self._begins[1:]).tolist(), len(table)]
        return lambda window: _between(table, ends[window - 1] if window else 0, ends[window])

    def _stored(self, run: Callable[[int], pa.Table]) -> Callable[[int], pa.Table]:
        """Write a sorted run to a temporary file; return what reads a window of it."""
        try:
            file = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
            self._files.append(file)
            options = ipc.IpcWriteOptions(compression="lz4")
            with ipc.new_file(pa.PythonFile(file, mode="w"), self._schema, options=options) as writer:
                for window in range(len(self._begins)):
                    writer.write_batch(_batch(run(window)))
        except OSError as error:
            folder = tempfile.gettempdir()
            raise OSError(
                f"{folder} takes no more temporary rows ({first_line(error)}); set TMPDIR to another"
            ) from error
        reader = ipc.open_file(pa.PythonFile(file, mode="r"))
        return lambda window: pa.Table.from_batches([reader.get_batch(window)])


def _keys(table: pa.Table) -> NDArray[np.int64]:
    return keys_of(table["file"].to_numpy(), table["row"].to_numpy())


def _between(table: pa.Table, begin: int, end: int) -> pa.Table:
    return table.slice(begin, end - begin)


def _batch(table: pa.Table) -> pa.RecordBatch:
    """Return a table of one chunk as a batch; `to_batches` gives none for a table without rows."""
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


class Tables:
    """Rows of some tables, taken in order in pieces of any size."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, num_rows: int) -> pa.Table:
        """Return the next rows; there must be as many."""
        pieces: list[pa.Table] = []
        while True:
            table = next(self._tables) if self._rest is None else self._rest
            pieces.append(table.slice(0, num_rows))
            num_rows -= len(pieces[-1])
            self._rest = table.slice(len(pieces[-1]))
            if not num_rows:
                return pa.concat_tables(pieces)
            self._rest = None
