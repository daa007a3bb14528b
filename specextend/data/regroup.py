"""Oversized row groups, rewritten once so that reading one document never means reading a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.data.documents import Copy, Source, columns_bytes, document_columns, open_parquet
from specextend.data.inputs import InputFile
from specextend.data.storage import Location, atomic_output, exists

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
    copies = {file.number: _copy(source, file, output) for file in source.files if _is_oversized(source, file)}
    return Source(source.options, source.root, source.files, source.passthrough_fields, copies) if copies else source


def _columns(source: Source) -> list[str]:
    tokens = source.options.num_tokens_column
    return list(dict.fromkeys(document_columns(source.options) + ([tokens] if tokens else [])))


def _is_oversized(source: Source, file: InputFile) -> bool:
    if file.size == 0 or not file.group_rows:
        return False
    with open_parquet(source.location(file.number)) as parquet:
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    return any(columns_bytes(group, _columns(source)) > MAX_GROUP_BYTES for group in groups)


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
    batches = source.batches(file.number, _columns(source), original=True)
    schema = None
    writer: pq.ParquetWriter | None = None
    for table in _grouped(batches):
        if writer is None:
            schema = table.schema.with_metadata({_ORIGIN: file.footer_sha256.encode()})
            writer = pq.ParquetWriter(path, schema, compression="zstd")
        writer.write_table(table.cast(schema), row_group_size=len(table))
    assert writer is not None, "an oversized file has rows"
    writer.close()


def _grouped(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Neighbouring batches joined until they hold 16 MiB."""
    waiting: list[pa.Table] = []
    for batch in batches:
        for start in range(len(batch)):
            waiting.append(batch.slice(start, 1))
            if sum(table.nbytes for table in waiting) >= COPY_GROUP_BYTES:
                yield pa.concat_tables(waiting)
                waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
