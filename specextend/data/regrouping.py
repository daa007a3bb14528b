"""Copies of input files with oversized row groups, in smaller groups: a worker reads a whole group for one document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.data.inputs import InputFile
from specextend.data.parquet import DAMAGED, as_bytes, halved, is_damaged, is_text, open_parquet
from specextend.data.run_folder import copies_folder
from specextend.data.source import Copy, Source
from specextend.data.storage import Location, atomic_output, delete, exists, list_files, remove_temporary_files

MAX_GROUP_BYTES = 64 << 20
"""Most bytes that a row group may take when the columns of a document are read from it; a file with a larger one is
copied."""
_GROUPS_PER_LIMIT = 4
"""A row group of a copy ends at this fraction of the limit, in uncompressed bytes."""

_COPY_NAME = re.compile(r"file-\d{5,}\.parquet")
_ORIGIN = b"specextend.footer_sha256"


def regroup(
    source: Source,
    output: Location,
    checkpoint: Callable[[], object] = lambda: None,
    max_group_bytes: int = MAX_GROUP_BYTES,
) -> Source:
    """Copy files that have a row group over the limit into `_run/input/`, in groups of a quarter of it.

    Keys stay the same. The driver calls it once it holds the lock. Streams; a copy that is already there and whole is
    used again. Returns the source for the workers (`source` itself if nothing is oversized). checkpoint: called between
    tables; may raise.
    """
    oversized = [file for file in source.files if file.largest_group_bytes > max_group_bytes]
    remove_temporary_files(copies_folder(output))
    group_bytes = max_group_bytes // _GROUPS_PER_LIMIT
    copies = {file.number: _copy(source, file, output, group_bytes, checkpoint) for file in oversized}
    return source.with_copies(copies) if copies else source


def remove_copies(output: Location) -> None:
    """Remove what `regroup` wrote, once the run no longer needs it; the driver calls it while it holds the lock."""
    folder = copies_folder(output)
    for name in list_files(folder):
        if _COPY_NAME.fullmatch(name):
            delete(folder.child(name))


def _columns(source: Source) -> list[str]:
    tokens = source.options.num_tokens_column
    return list(dict.fromkeys(source.options.document_columns + ([tokens] if tokens else [])))


def _copy(
    source: Source, file: InputFile, output: Location, group_bytes: int, checkpoint: Callable[[], object]
) -> Copy:
    location = copies_folder(output).child(f"file-{file.number:05d}.parquet")
    if not (exists(location) and _is_copy(location, file)):
        with atomic_output(location) as path:
            batches = source.batches(file.number, _columns(source), original=True)
            _write_copy(_grouped(batches, group_bytes), file, path, checkpoint)
    with open_parquet(location) as parquet:
        metadata = parquet.metadata
        return Copy(location, tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))


def _is_copy(location: Location, file: InputFile) -> bool:
    """Return True if it is a whole copy of this file; a damaged one (an upload cut short) is written again."""
    try:
        with open_parquet(location) as parquet:
            origin = (parquet.schema_arrow.metadata or {}).get(_ORIGIN)
            return origin == file.footer_sha256.encode() and parquet.metadata.num_rows == file.num_rows
    except DAMAGED as error:
        if not is_damaged(location, error):
            raise
        return False


def _write_copy(tables: Iterator[pa.Table], file: InputFile, path: str, checkpoint: Callable[[], object]) -> None:
    first = next(tables)
    schema = first.schema.with_metadata({_ORIGIN: file.footer_sha256.encode()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in chain([first], tables):
            checkpoint()
            writer.write_table(table.cast(schema), row_group_size=len(table))


def _grouped(batches: Iterator[pa.Table], group_bytes: int) -> Iterator[pa.Table]:
    """Join neighbouring rows to groups of at most `group_bytes`; a larger row is a group of its own."""
    waiting: list[pa.Table] = []
    num_bytes = 0
    for piece in (piece for batch in batches for piece in halved(_plain(batch), group_bytes)):
        if waiting and num_bytes + piece.nbytes > group_bytes:
            yield pa.concat_tables(waiting)
            waiting, num_bytes = [], 0
        waiting.append(piece)
        num_bytes += piece.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _plain(table: pa.Table) -> pa.Table:
    """Cast text columns to large_string, byte for byte, so that the size of a slice is that of its text."""
    for position, field in enumerate(table.schema):
        if is_text(field.type):
            text = as_bytes(table[field.name]).cast(pa.large_string(), safe=False)
            table = table.set_column(position, field.name, text)
    return table
