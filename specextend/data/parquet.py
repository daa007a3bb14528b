"""Reading Parquet without holding more of it than needed."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.data.inputs import InputOptions
from specextend.data.storage import Location

_BATCH_BYTES = 16 << 20
_MAX_BATCH_ROWS = 256

DAMAGED = (OSError, pa.ArrowException, UnicodeDecodeError)
"""What reading a file raises that is no Parquet, or not to its end, or whose columns have names that are not UTF-8."""


def open_parquet(location: Location) -> pq.ParquetFile:
    """Open for streaming: pages are read as they are needed."""
    return pq.ParquetFile(location.path, filesystem=location.filesystem, buffer_size=1 << 20, pre_buffer=False)


def stream(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[pa.Table]:
    """Tables of about 16 MiB and 256 rows at most, in row order; none spans two row groups."""
    for group in range(parquet.metadata.num_row_groups):
        mean_bytes = columns_bytes(parquet, group, columns) / max(1, parquet.metadata.row_group(group).num_rows)
        rows = int(min(_MAX_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, mean_bytes))))
        for batch in parquet.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
            yield pa.Table.from_batches([batch])


def columns_bytes(parquet: pq.ParquetFile, number: int, columns: list[str]) -> int:
    """Uncompressed bytes of some columns of a row group; of all its columns where that is little.

    pyarrow ends the process when it is asked about a column whose entry in the footer is damaged, but raises when it
    reads such a column. So it is asked about large groups only, once it has read a row. Raises ArrowException.
    """
    group = parquet.metadata.row_group(number)
    if group.total_byte_size <= _BATCH_BYTES:
        return max(0, group.total_byte_size)
    next(parquet.iter_batches(batch_size=1, row_groups=[number], columns=columns), None)
    paths = [parquet.schema.column(i).path for i in range(group.num_columns)]
    wanted = [i for i, path in enumerate(paths) if path.split(".")[0] in columns]
    return sum(group.column(i).total_uncompressed_size for i in wanted)


def document_columns(options: InputOptions) -> list[str]:
    """The columns that a row is made of."""
    wanted = (options.text_column, options.id_column, options.max_new_tokens_column)
    return list(dict.fromkeys(column for column in wanted if column is not None))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text; one without values (pandas writes such) has no type of its own."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )


def as_bytes(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text as it was stored: bytes that are not UTF-8 must not raise here."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    return values.cast(pa.large_binary())


def plain_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text or integers as large_string. Raises ArrowInvalid for bytes that are not UTF-8."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    values = values.cast(pa.large_string())
    values.validate(full=True)
    return values
