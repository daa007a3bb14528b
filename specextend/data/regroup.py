"""Oversized row groups, rewritten once so that reading one document never means reading a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.data.documents import Copy, Source
from specextend.data.inputs import InputFile
from specextend.data.parquet import as_bytes, document_columns, is_text, open_parquet
from specextend.data.storage import Location, atomic_output, exists, remove_temporary_files

MAX_GROUP_BYTES = 64 << 20
"""Uncompressed bytes of a row group, the columns that are read for a document counted."""
COPY_GROUP_BYTES = 16 << 20
"""Uncompressed bytes at which a row group of the copy ends."""

_ORIGIN = b"specextend.footer_sha256"


def regroup(source: Source, output: Location) -> Source:
    """Copy files that have a row group over 64 MiB into `_run/input/` in groups of 16 MiB; keys stay the same.

    The driver calls it once it holds the lock. Streams; a copy that is already there and whole is used again.
    Returns the source to ship to workers (`source` itself when nothing is oversized).
    """
    oversized = [file for file in source.files if file.largest_group_bytes > MAX_GROUP_BYTES]
    remove_temporary_files(output.child("_run", "input"))
    copies = {file.number: _copy(source, file, output) for file in oversized}
    return Source(source.options, source.root, source.files, source.passthrough_fields, copies) if copies else source


def _columns(source: Source) -> list[str]:
    tokens = source.options.num_tokens_column
    return list(dict.fromkeys(document_columns(source.options) + ([tokens] if tokens else [])))


def _copy(source: Source, file: InputFile, output: Location) -> Copy:
    location = output.child("_run", "input", f"file-{file.number:05d}.parquet")
    if not (exists(location) and _is_copy(location, file)):
        with atomic_output(location) as path:
            _write_copy(source, file, path)
    with open_parquet(location) as parquet:
        metadata = parquet.metadata
        return Copy(location, tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))


def _is_copy(location: Location, file: InputFile) -> bool:
    """Whether it is a whole copy of this very file; a broken one (an upload cut short) is written again."""
    try:
        with open_parquet(location) as parquet:
            origin = (parquet.schema_arrow.metadata or {}).get(_ORIGIN)
            return origin == file.footer_sha256.encode() and parquet.metadata.num_rows == file.num_rows
    except pa.ArrowInvalid:
        return False


def _write_copy(source: Source, file: InputFile, path: str) -> None:
    tables = _grouped(source.batches(file.number, _columns(source), original=True))
    first = next(tables)
    schema = first.schema.with_metadata({_ORIGIN: file.footer_sha256.encode()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in chain([first], tables):
            writer.write_table(table.cast(schema), row_group_size=len(table))


def _grouped(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Neighbouring rows joined to groups of at most 16 MiB; a larger row is a group of its own."""
    waiting: list[pa.Table] = []
    num_bytes = 0
    for piece in (piece for batch in batches for piece in _halved(_plain(batch))):
        if waiting and num_bytes + piece.nbytes > COPY_GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, num_bytes = [], 0
        waiting.append(piece)
        num_bytes += piece.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _halved(table: pa.Table) -> Iterator[pa.Table]:
    """Slices of at most 16 MiB, or of one row."""
    if len(table) <= 1 or table.nbytes <= COPY_GROUP_BYTES:
        yield table
        return
    middle = len(table) // 2
    yield from _halved(table.slice(0, middle))
    yield from _halved(table.slice(middle))


def _plain(table: pa.Table) -> pa.Table:
    """Text columns as large_string, byte for byte: the size of a slice of theirs is that of its text."""
    for position, field in enumerate(table.schema):
        if is_text(field.type):
            text = as_bytes(table[field.name]).cast(pa.large_string(), safe=False)
            table = table.set_column(position, field.name, text)
    return table
