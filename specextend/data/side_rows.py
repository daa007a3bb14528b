"""Rows that the driver commits beside results: each start writes files of its own into one folder of `_run/`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import one_line
from specextend.data.in_order import in_order
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.parts import DamagedPartError
from specextend.data.storage import Location, list_files, write_bytes


class SideWriter:
    """Commits rows to `<folder>/<stem>-<run id>-<seq>.parquet`; one writer per start of a run."""

    def __init__(self, folder: Location, stem: str, schema: pa.Schema, run_id: str) -> None:
        self._folder, self._schema, self._run_id = folder, schema, run_id
        self._stem, self._next_seq = f"{stem}-{run_id}", 0

    def commit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of the schema, whole or not at all; a column `run_id` is filled in."""
        if not rows:
            return
        table = pa.Table.from_pylist([{**row, "run_id": self._run_id} for row in rows], schema=self._schema)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        write_bytes(self._folder.child(f"{self._stem}-{self._next_seq:06d}.parquet"), sink.getvalue())
        self._next_seq += 1


def read_side_rows(folder: Location, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of all starts, file by file; none if there is no such folder. Raises DamagedPartError."""
    files = [folder.child(name) for name in list_files(folder) if name.endswith(".parquet")]
    yield from in_order(partial(_read, schema), files)


def _read(schema: pa.Schema, file: Location) -> pa.Table:
    try:
        return pq.read_table(file.path, filesystem=file.filesystem).select(schema.names).cast(schema)
    except (*DAMAGED, KeyError) as error:
        if not is_damaged(file, error):
            raise
        raise DamagedPartError(
            f"{file.path} is damaged ({one_line(error)}); delete it to do without its rows"
        ) from error
