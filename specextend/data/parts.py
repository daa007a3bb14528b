"""Append-only commits, which are the only record of finished rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import one_line
from specextend.data.fingerprint import read_manifest
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.provenance import PROVENANCE
from specextend.data.run_folder import parts_folder
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location, file_sizes, remove_temporary_files, write_bytes

_NAME = re.compile(r"part-(?P<run_id>[0-9a-f]{8})-(?P<seq>\d{6,})\.parquet")
_RUN_ID, _FINGERPRINT = b"specextend.run_id", b"specextend.fingerprint"
_WHOLE_BYTES = 1 << 20
"""A part up to this size is read in one request, also if few of its columns are wanted."""
KEY_COLUMNS = ("file", "row", "error_class")
"""The columns that name the row of a result, and whether it is done: then the last is null."""
ORIGIN_SCHEMA = pa.schema([("origin", pa.dictionary(pa.int32(), pa.string())), ("origin_row", pa.int32())])
"""Columns of a merged part: the part with which a row was committed, and its place in that part.

They can be read from every part: a row of a part that was not merged is where it was committed.
"""
ORIGIN = tuple(ORIGIN_SCHEMA.names)
_FIELDS = {field.name: field for field in (*PART_SCHEMA, *ORIGIN_SCHEMA)}


class DamagedPartError(ValueError):
    """A part that cannot be read."""


class StrangePartError(ValueError):
    """A part of another run."""


class PartWriter:
    """Commits rows to `_run/parts/part-<run id>-<seq>.parquet`; one writer per output folder, which holds its lock.

    `seq` continues after the highest in the folder, so the order of commits over all starts is the order of
    (seq, run id): this is what "later" means. run_id: 8 hexadecimal digits. fingerprint: that of the run; origin: its
    `provenance`. Both are written into every part.
    """

    def __init__(self, output: Location, run_id: str, fingerprint: str = "", origin: bytes = b"") -> None:
        if not re.fullmatch(r"[0-9a-f]{8}", run_id):
            raise ValueError(f"a run id is 8 hexadecimal digits, got {run_id!r}")
        self.run_id = run_id
        self._schema = PART_SCHEMA.with_metadata(part_metadata(run_id, fingerprint, origin))
        self._folder = parts_folder(output)
        remove_temporary_files(self._folder)
        names = list_parts(output)
        self._next_seq = commit_order(names[-1])[0] + 1 if names else 0

    def commit(self, rows: Sequence[dict[str, Any]]) -> str | None:
        """Write rows of `result_row` and `error_row`, whole or not at all.

        Returns the part's name; None if there are no rows.
        """
        if not rows:
            return None
        name = f"part-{self.run_id}-{self._next_seq:06d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(list(rows), schema=self._schema), sink, compression="zstd")
        write_bytes(self._folder.child(name), sink.getvalue())
        self._next_seq += 1
        return name


def part_metadata(run_id: str, fingerprint: str, origin: bytes) -> dict[bytes, bytes | str]:
    """Return what a part says about itself. origin: its `provenance`; what is empty is left out."""
    metadata: dict[bytes, bytes | str] = {_RUN_ID: run_id, _FINGERPRINT: fingerprint} if fingerprint else {}
    return metadata | ({PROVENANCE: origin} if origin else {})


def part_sizes(output: Location) -> dict[str, int]:
    """Return the bytes of the parts by name, in the order of their commits."""
    sizes = file_sizes(parts_folder(output))
    return {name: sizes[name] for name in sorted(filter(_NAME.fullmatch, sizes), key=commit_order)}


def list_parts(output: Location) -> list[str]:
    """List the names of the parts in the order of their commits."""
    return list(part_sizes(output))


def recorded_fingerprint(output: Location) -> str:
    """Return the fingerprint in an output folder's manifest; empty if there is none."""
    manifest = read_manifest(output)
    return "" if manifest is None else str(manifest["fingerprint"])


def read_part(
    output: Location, name: str, columns: Sequence[str], fingerprint: str = "", num_bytes: int = 0
) -> pa.Table:
    """Read columns of one part with the types of PART_SCHEMA and ORIGIN_SCHEMA.

    A column that an older version did not have is null. num_bytes: size of the part; a large one is read by columns.
    Raises DamagedPartError if it cannot be read: none of our writers leaves such a part. Raises StrangePartError if it
    names another run than `fingerprint`; parts of older versions name none.
    """
    location = parts_folder(output).child(name)
    try:
        with location.filesystem.open_input_file(location.path) as file:
            contents = pa.BufferReader(file.read_buffer()) if num_bytes <= _WHOLE_BYTES else file
            with pq.ParquetFile(contents, pre_buffer=True) as parquet:
                found = (parquet.schema_arrow.metadata or {}).get(_FINGERPRINT, b"").decode()
                there = [column for column in columns if column in parquet.schema_arrow.names]
                table = _typed(name, parquet.read(there), columns, parquet.metadata.num_rows)
    except (*DAMAGED, KeyError) as error:
        if not is_damaged(location, error):
            raise
        raise DamagedPartError(
            f"{location.path} is damaged ({one_line(error)}); delete it to do its documents again"
        ) from error
    if found and fingerprint and found != fingerprint:
        which = f"fingerprint {found[:12]}, here {fingerprint[:12]}"
        raise StrangePartError(f"{location.path} is a part of another run ({which}); move it away")
    return table


def _typed(name: str, table: pa.Table, columns: Sequence[str], num_rows: int) -> pa.Table:
    """Cast the columns to their types. Raises KeyError for a part without keys, or ArrowException."""
    if missing := [column for column in KEY_COLUMNS if column in columns and column not in table.column_names]:
        raise KeyError(f"it has no column {missing[0]}")
    known = dict(zip(table.column_names, table.columns, strict=True))
    fields = [_FIELDS[column] for column in columns]
    arrays = [_column(field, known, name, num_rows) for field in fields]
    return pa.table(arrays, schema=pa.schema(fields))


def _column(field: pa.Field, known: Mapping[str, pa.ChunkedArray], name: str, num_rows: int) -> pa.ChunkedArray:
    """Return a column of a part with its type, whether the part has it or not."""
    if field.name in known and known[field.name].null_count < num_rows:
        return known[field.name].cast(field.type)
    if field.name == "origin":
        first = pa.array(np.zeros(num_rows, np.int32))
        return pa.chunked_array([pa.DictionaryArray.from_arrays(first, pa.array([name]))])
    if field.name == "origin_row":
        return pa.chunked_array([pa.array(np.arange(num_rows, dtype=np.int32))])
    return pa.chunked_array([pa.nulls(num_rows, field.type)])


def run_id_of(name: str) -> str:
    """Return the run id of the start that wrote a part, from the part's name."""
    return commit_order(name)[1]


def commit_order(name: str) -> tuple[int, str]:
    """Return (seq, run id) of a part's name, by which parts are ordered."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match["seq"]), match["run_id"]
