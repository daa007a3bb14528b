"""Rows that come in any order, taken in the order of the input: sorted in memory, or on disk if there are many."""

import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from specextend.data.database import temporary_room

BUFFER_BYTES = 128 << 20
"""Bytes of rows that are sorted in memory; if there are more, they go to temporary files."""
_BATCH_BYTES = 512 << 10
"""Bytes of a temporary file that are in memory at a time, about."""
_FILE_BITS = 32
"""A key is one number: that of the file, and in so many lower bits that of the row."""


class SortedRows:
    """Rows of one schema, which has columns `file` and `row`, added in any order and taken in the order of the input.

    Holds `buffer_bytes` of rows and a sorted copy of them. More go to temporary files without a name, each sorted; the
    system removes them when the process ends, however it ends.
    """

    def __init__(self, schema: pa.Schema, buffer_bytes: int = BUFFER_BYTES):
        self._schema, self._buffer_bytes = schema, buffer_bytes
        self._waiting: list[pa.Table] = []
        self._num_bytes = 0
        self._files: list[IO[bytes]] = []

    def close(self) -> None:
        """Remove the temporary files."""
        for file in self._files:
            file.close()

    def add(self, rows: pa.Table) -> None:
        """Add rows. Raises OSError if the temporary folder has no room."""
        self._waiting.append(rows.select(self._schema.names))
        self._num_bytes += rows.nbytes
        if self._num_bytes >= self._buffer_bytes:
            self._store()

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows in order, as tables of a few hundred kilobytes. Nothing can be added any more."""
        runs = [*map(_stored_batches, self._files), _batches(self._sorted())]
        heads = [_Head(run) for run in runs]
        while heads := [head for head in heads if len(head.keys)]:
            bound = min(head.keys[-1] for head in heads)
            yield _in_order(pa.concat_tables([head.take(bound) for head in heads]))

    def _sorted(self) -> pa.Table:
        """Sort the rows that wait, and forget them."""
        table = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        self._waiting, self._num_bytes = [], 0
        return _in_order(table)

    def _store(self) -> None:
        """Write the rows that wait to a temporary file."""
        with temporary_room():
            file = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
            self._files.append(file)
            options = ipc.IpcWriteOptions(compression="lz4")
            with ipc.new_stream(pa.PythonFile(file, mode="w"), self._schema, options=options) as writer:
                for batch in _batches(self._sorted()):
                    writer.write_table(batch)


class _Head:
    """The next rows of a sorted run: `keys` [N], without any at its end."""

    def __init__(self, run: Iterator[pa.Table]):
        self._run = run
        self._table: pa.Table
        self.keys = np.zeros(0, np.int64)
        self._advance()

    def take(self, bound: int) -> pa.Table:
        """Return the next rows with keys up to `bound`, which is not beyond the last one at hand."""
        count = int(np.searchsorted(self.keys, bound, side="right"))
        taken = self._table.slice(0, count)
        self._table, self.keys = self._table.slice(count), self.keys[count:]
        if not len(self.keys):
            self._advance()
        return taken

    def _advance(self) -> None:
        if (table := next(self._run, None)) is not None:
            self._table, self.keys = table, _keys(table)


def _keys(table: pa.Table) -> NDArray[np.int64]:
    """Return one number for each row [N], by which rows are sorted."""
    keys: NDArray[np.int64] = (table["file"].to_numpy().astype(np.int64) << _FILE_BITS) + table["row"].to_numpy()
    return keys


def _in_order(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.argsort(_keys(table), kind="stable"))).combine_chunks()


def _batches(table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table into small ones, of at least one row."""
    num_rows = max(1, len(table) * _BATCH_BYTES // max(1, table.nbytes))
    yield from (table.slice(begin, num_rows) for begin in range(0, len(table), num_rows))


def _stored_batches(file: IO[bytes]) -> Iterator[pa.Table]:
    file.seek(0)
    with ipc.open_stream(pa.PythonFile(file, mode="r")) as reader:
        yield from (pa.Table.from_batches([batch]) for batch in reader)


class Tables:
    """Rows of some tables, taken in order in pieces of any size."""

    def __init__(self, tables: Iterator[pa.Table]):
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, num_rows: int) -> Iterator[pa.Table]:
        """Yield the next rows in tables as they come; there must be as many."""
        while num_rows:
            table = next(self._tables) if self._rest is None else self._rest
            taken = table.slice(0, num_rows)
            num_rows -= len(taken)
            self._rest = table.slice(len(taken)) if len(taken) < len(table) else None
            yield taken
