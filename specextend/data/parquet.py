"""Read Parquet files in bounded memory, and write them with checksums."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.core import Values, one_line
from specextend.data.storage import Location, Value, is_away, out_of_reach, read_again, write_bytes

Ints = NDArray[np.int64]
BATCH_BYTES = 16 << 20
_MAX_BATCH_ROWS = 256
CHECKED = {"page_checksum_verification": True}
"""Options of every reader: verify page checksums where present."""
SEALED = {"compression": "zstd", "write_page_checksum": True}
_COMPACT = {"PLAIN", "PLAIN_DICTIONARY", "RLE", "RLE_DICTIONARY", "BIT_PACKED"}
"""Text encodings that pyarrow can read as a dictionary."""
DAMAGED = (OSError, pa.ArrowException, UnicodeDecodeError)
"""Errors of files that are damaged, not Parquet, or have column names in another encoding."""
_HASH_BYTES = 64
"""Largest fixed-size binary value that counts as a hash, not as text."""
_GROUP_ROWS = 4096


Damaged = Callable[[Exception], Exception]
"""Makes the error for a damaged file from a read error."""


def damaged_as(kind: type[Exception], location: Location, way_out: str) -> Damaged:
    """Return a function that makes one-line errors ending with `way_out`."""
    return lambda error: kind(f"{location.path} is damaged ({one_line(error)}); {way_out}")


def read_file(
    location: Location,
    read: Callable[[pa.NativeFile], Value],
    damaged: Damaged,
    num_bytes: int | None = None,
) -> Value:
    """Return the result of `read` for an open file. A file that does not parse is read twice.

    Args:
        damaged: Makes the error for a damaged file.
        num_bytes: Size of the file in the listing.

    Raises:
        OSError: The file is out of reach.
    """
    try:
        with location.filesystem.open_input_file(location.path) as file:
            return read(file)
    except (*DAMAGED, KeyError) as error:
        if is_away(error):
            raise
    try:
        return read_again(location, read, num_bytes)
    except (*DAMAGED, KeyError) as error:
        if is_away(error):
            raise
        raise damaged(error) from error


def read_stream(
    location: Location,
    read: Callable[[pq.ParquetFile], Iterator[pa.Table]],
    damaged: Damaged,
    num_bytes: int | None = None,
    compact: Sequence[str] = (),
) -> Iterator[pa.Table]:
    """Yield tables from a file of any size; as `read_file` otherwise.

    Tables cannot be taken back after an error. If a second reading succeeds, the file was briefly
    out of reach.
    """
    try:
        with open_parquet(location, compact) as parquet:
            yield from read(parquet)
    except (*DAMAGED, KeyError) as error:
        if not is_away(error):
            read_file(
                location,
                lambda file: deque(read(open_parquet(file, compact)), maxlen=0),
                damaged,
                num_bytes,
            )
        raise out_of_reach(location, error) from error


def write_table(location: Location, table: pa.Table) -> None:
    """Write a small table atomically."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **SEALED)
    write_bytes(location, sink.getvalue())


def as_stored(schema: pa.Schema) -> pa.Schema:
    """Return `schema` as read back from Parquet, which has no seconds, for example."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    return pq.read_schema(pa.BufferReader(sink.getvalue()))


def open_parquet(
    source: Location | pa.NativeFile, compact: Sequence[str] = (), int96_unit: str = "us"
) -> pq.ParquetFile:
    """Open a file for streaming.

    Args:
        compact: Text columns to read as dictionaries.
        int96_unit: Unit of INT96 times. Nanoseconds cover only the years 1678 to 2262.
    """
    is_place = isinstance(source, Location)
    return pq.ParquetFile(
        source.path if is_place else source,
        filesystem=source.filesystem if is_place else None,
        buffer_size=1 << 20,
        pre_buffer=False,
        read_dictionary=list(compact),
        coerce_int96_timestamp_unit=int96_unit,
        **CHECKED,
    )


def leaves(parquet: pq.ParquetFile, columns: Iterable[str]) -> list[int]:
    """Return the indices of the stored columns that make up `columns`."""
    # Names of columns and leaves may contain dots.
    begins = tuple(f"{column}." for column in columns)
    return [
        i
        for i in range(len(parquet.schema))
        if f"{parquet.schema.column(i).path}.".startswith(begins)
    ]


def compact_columns(parquet: pq.ParquetFile, columns: list[str]) -> set[str]:
    """Return the text columns readable as dictionaries."""
    texts = (field for field in parquet.schema_arrow if is_text(field.type))
    found = {field.name for field in texts if not pa.types.is_dictionary(field.type)} & {*columns}
    for number in range(parquet.metadata.num_row_groups):
        if next(_batches(parquet, number, columns, 1), None) is None:
            continue  # see `_stored_bytes`
        group = parquet.metadata.row_group(number)
        chunks = map(group.column, leaves(parquet, found))
        found -= {each.path_in_schema for each in chunks if not _COMPACT.issuperset(each.encodings)}
    return found


def has_exact_int96(parquet: pq.ParquetFile, file: pa.NativeFile, columns: Sequence[str]) -> bool:
    """Return False if an INT96 time has a fraction of a microsecond.

    Nanoseconds overflow modulo 2^64, as the multiplication does.
    """
    if not any(parquet.schema.column(i).physical_type == "INT96" for i in leaves(parquet, columns)):
        return True
    with open_parquet(file, int96_unit="ns") as exact:
        tables = (stream(each, list(columns)) for each in (parquet, exact))
        return all(
            values.type == in_ns.type
            or pc.multiply(values.cast("int64"), 1000).equals(in_ns.cast("int64"))
            for both in zip(*tables, strict=True)
            for values, in_ns in zip(*map(_leaves_of, both), strict=True)
        )


def _leaves_of(table: pa.Table) -> list[pa.Array]:
    return [
        leaf for values in table.columns for chunk in values.chunks for leaf in plain_leaves(chunk)
    ]


def plain_leaves(values: pa.Array) -> list[pa.Array]:
    """Return the flat arrays of a nested array, with dictionaries decoded."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return [values.dictionary_decode()]
    if pa.types.is_map(kind):
        inner = [values.keys, values.items]
    elif pa.types.is_struct(kind):
        inner = values.flatten()
    else:
        inner = [values.flatten()] if kind.num_fields else []
    return [leaf for each in inner for leaf in plain_leaves(each)] or [values]


def stream(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[pa.Table]:
    """Yield tables of at most about 16 MiB and 256 rows, none from two row groups.

    Text in dictionaries counts as if decoded.
    """
    for group in range(parquet.metadata.num_row_groups):
        stored_bytes = max(1, _stored_bytes(parquet, group, columns))
        num_rows = BATCH_BYTES * parquet.metadata.row_group(group).num_rows // stored_bytes
        for table in _batches(parquet, group, columns, min(_MAX_BATCH_ROWS, max(1, num_rows))):
            yield from halved(table, BATCH_BYTES)


def rows_where(table: pa.Table, mask: NDArray[np.bool_]) -> pa.Table:
    """Select rows as slices: Arrow's filter lacks some types, such as string views."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return pa.concat_tables(
        [table.slice(0, 0), *(table.slice(begin, end - begin) for begin, end in edges.tolist())]
    )


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast a table to a schema; missing columns are null."""
    columns = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def halved(table: pa.Table, most_bytes: int) -> Iterator[pa.Table]:
    """Yield slices of at most `most_bytes`, or of a single row."""
    if len(table) <= 1 or sum(map(_plain_bytes, table.columns)) <= most_bytes:
        yield table
        return
    middle = len(table) // 2
    yield from halved(table.slice(0, middle), most_bytes)
    yield from halved(table.slice(middle), most_bytes)


def _plain_bytes(values: pa.ChunkedArray) -> int:
    if not pa.types.is_dictionary(values.type) or not is_text(values.type):
        return int(values.nbytes)
    lengths = (pc.binary_length(chunk.dictionary).take(chunk.indices) for chunk in values.chunks)
    return sum(pc.sum(each).as_py() or 0 for each in lengths)


def _batches(
    parquet: pq.ParquetFile, group: int, columns: list[str], num_rows: int
) -> Iterator[pa.Table]:
    for batch in parquet.iter_batches(batch_size=num_rows, row_groups=[group], columns=columns):
        yield pa.table(batch)


def largest_group_bytes(parquet: pq.ParquetFile, columns: list[str]) -> int:
    """Return the memory needed to read `columns` of the largest row group, with compact text."""
    return max(
        (
            _stored_bytes(parquet, number, columns)
            + 8 * len(columns) * parquet.metadata.row_group(number).num_rows
            for number in range(parquet.metadata.num_row_groups)
        ),
        default=0,
    )


def _stored_bytes(parquet: pq.ParquetFile, number: int, columns: list[str]) -> int:
    """Return the uncompressed bytes of `columns` in a row group, or of the whole group if small."""
    group = parquet.metadata.row_group(number)
    if group.total_byte_size <= BATCH_BYTES:
        return max(0, group.total_byte_size)
    # For a column with a damaged footer entry, pyarrow aborts the process when asked for metadata,
    # but raises when reading. So read a row first.
    if next(_batches(parquet, number, columns, 1), None) is None:
        return 0
    return sum(group.column(i).total_uncompressed_size for i in leaves(parquet, columns))


def is_text(kind: pa.DataType) -> bool:
    """Return True for text, JSON, and columns without values, which pandas writes untyped.

    Bytes may have any encoding and never count as text.
    """
    kind = _written_out(kind)
    strings = (pa.string(), pa.large_string(), pa.null())
    return kind in strings or isinstance(kind, pa.JsonType)


def is_id(kind: pa.DataType) -> bool:
    """Return True for types with one spelling per value: text, integers, whole decimals, UUIDs."""
    is_whole = pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0)
    return is_text(kind) or is_whole or isinstance(kind, pa.UuidType)


def way_out(column: str, kind: pa.DataType, wanted: str) -> str:
    """Return advice to cast a column to the SQL type `wanted`; empty for nested types."""
    name = '"' + column.replace('"', '""') + '"'
    if kind.num_fields:
        return ""
    if wanted != "VARCHAR" or not is_bytes(kind):
        cast = f"CAST({name} AS {wanted})"
    else:
        is_hash = pa.types.is_fixed_size_binary(kind) and kind.byte_width <= _HASH_BYTES
        cast = f"{'hex' if is_hash else 'decode'}({name})"
    return (
        f"; cast it when you write the Parquet, as in DuckDB: SELECT * REPLACE ({cast} AS "
        f"{name}) FROM ..."
    )


def is_bytes(kind: pa.DataType) -> bool:
    """Return True for a column of bytes."""
    kind = _written_out(kind)
    return kind in (pa.binary(), pa.large_binary()) or pa.types.is_fixed_size_binary(kind)


def joint_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type for the values of both types; individual values may still not fit.

    Dictionaries and views are decoded, and the first time zone wins. Text never becomes bytes, nor
    a decimal a float. Raises ArrowTypeError if there is none.
    """
    if one == other:
        return one
    one = _with_leaves(one, _written_out)
    other = _with_leaves(other, _written_out)
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz and other.tz:
        other = pa.timestamp(other.unit, one.tz)
    schemas = [pa.schema([("", kind)]) for kind in (one, other)]
    joint = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    for kind in (one, other):
        for is_kept in (is_text, pa.types.is_decimal):
            if _num_leaves(kind, is_kept) > _num_leaves(joint, is_kept):
                raise pa.ArrowTypeError(f"{kind} does not fit into {joint}")
    return joint


def _written_out(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _written_out(kind.value_type)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _with_leaves(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_leaves(field.type, change)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_with_leaves(kind.value_type, change))
    if pa.types.is_large_list(kind):
        return pa.large_list(_with_leaves(kind.value_type, change))
    return change(kind)


def _num_leaves(kind: pa.DataType, is_counted: Callable[[pa.DataType], bool]) -> int:
    return sum(is_counted(leaf.type) for leaf in plain_leaves(pa.nulls(0, kind)))


def plain_rows(table: pa.Table, columns: Sequence[str]) -> Iterator[Values]:
    """Yield the values of each row, with text as bytes, since it may not be UTF-8."""
    arrays = (
        table[name].cast(
            _with_leaves(
                table[name].type, lambda kind: pa.large_binary() if is_text(kind) else kind
            )
        )
        for name in columns
    )
    for values in zip(*(array.to_pylist() for array in arrays), strict=True):
        yield dict(zip(columns, values, strict=True))


def plain_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cast a column of ids to large_string. Raises ArrowInvalid unless it is UTF-8."""
    if isinstance(values.type, pa.UuidType):
        spelled = [None if value is None else str(value) for value in values.to_pylist()]
        return pa.chunked_array([pa.array(spelled, "large_string")])
    values = values.cast("large_string")
    values.validate(full=True)
    return values


def gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join tables until they have 4,096 rows or 16 MiB."""
    waiting: list[pa.Table] = []
    num_rows = num_bytes = 0
    for table in tables:
        waiting.append(table)
        num_rows += len(table)
        num_bytes += table.get_total_buffer_size()  # a slice keeps its whole table in memory
        if num_rows >= _GROUP_ROWS or num_bytes >= BATCH_BYTES:
            yield pa.concat_tables(waiting)
            waiting = []
            num_rows = 0
            num_bytes = 0
    if waiting:
        yield pa.concat_tables(waiting)


def write_groups(path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write tables in row groups of reasonable size, since a writer holds metadata of each.

    Dictionaries differ between tables, so tables with dictionaries are not joined.
    """
    has_dictionary = any("dictionary<" in str(field.type) for field in schema)
    filled = (table for table in tables if len(table))
    with pq.ParquetWriter(path, schema, **SEALED) as writer:
        for table in filled if has_dictionary else gathered(filled):
            writer.write_table(table)
