"""What must hold of the input before anything is loaded: files that open, columns of the right type, unique ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.data.inputs import InputError, InputFile, InputOptions, InputUnreachableError, unreadable
from specextend.data.listing import Listing, ask
from specextend.data.parquet import DAMAGED, columns_bytes, document_columns, is_text, open_parquet, plain_text
from specextend.data.schema import SUMMARY_SCHEMA
from specextend.data.storage import Location

MOST_PROBLEMS = 5
"""Files that a message tells of; the others are counted."""


def audit(listing: Listing, options: InputOptions) -> tuple[tuple[InputFile, ...], tuple[pa.Field, ...]]:
    """The files with their row counts, and the passthrough columns' fields.

    Raises InputError, in one line: what is wrong with files comes all at once, then ids that are repeated.
    """
    _check_passthrough_names(options)
    files, fields, ids, problems = [], [], [], []
    for number in range(len(listing.relative_paths)):
        try:
            file, its_fields, its_ids = _audit_file(listing, number, options)
        except InputUnreachableError:
            raise  # of the next file there will be no more to know
        except InputError as error:
            problems.append(str(error))
        else:
            files.append(file)
            fields.append(its_fields)
            ids.append(its_ids)
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise InputError("; ".join(problems[:MOST_PROBLEMS]) + (f"; and {more} more such files" if more > 0 else ""))
    _check_unique(ids, listing)
    return tuple(files), _unify(fields, options, listing)


def _audit_file(
    listing: Listing, number: int, options: InputOptions
) -> tuple[InputFile, list[pa.Field], pa.ChunkedArray]:
    """A file, its passthrough fields, and its ids where there is a column of them. Raises InputError."""
    name, size = listing.relative_paths[number], listing.sizes[number]
    location = listing.root.child(name)
    try:
        with open_parquet(location) as parquet:
            _check_columns(name, parquet.schema_arrow, options)
            fields = [parquet.schema_arrow.field(column) for column in options.passthrough]
            ids = _read_ids(name, parquet, options.id_column)
            rows = _group_rows(parquet.metadata)
            groups = range(len(rows))
            largest = max((columns_bytes(parquet, i, document_columns(options)) for i in groups), default=0)
        modified_ns = ask(location, name).mtime_ns
        return InputFile(number, name, size, rows, largest, footer_sha256(location), modified_ns), fields, ids
    except DAMAGED as error:
        if isinstance(error, OSError):
            ask(location, name)
        raise unreadable(name, error) from error


def _group_rows(metadata: pq.FileMetaData) -> tuple[int, ...]:
    """Rows of each row group. Raises ArrowInvalid where they cannot be, or do not add up."""
    rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        raise pa.ArrowInvalid(f"its row groups hold {sum(rows)} rows, its footer says {metadata.num_rows}")
    return rows


def footer_sha256(location: Location) -> str:
    """Hash of a Parquet file's footer: its schema, row groups and where their data lies."""
    with location.filesystem.open_input_file(location.path) as file:
        size = file.size()
        length = int.from_bytes(file.read_at(8, size - 8)[:4], "little") + 8
        return hashlib.sha256(file.read_at(length, size - length)).hexdigest()


def _is_count(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_null(kind)


def _is_id(kind: pa.DataType) -> bool:
    return is_text(kind) or _is_count(kind)


def _check_passthrough_names(options: InputOptions) -> None:
    ours = [name for name in options.passthrough if name in SUMMARY_SCHEMA.names]
    if ours:
        raise InputError(f"input.passthrough names {', '.join(ours)}, a column of ours; rename it in the input")


def _check_columns(file: str, schema: pa.Schema, options: InputOptions) -> None:
    wanted = [
        ("text_column", options.text_column, is_text, "a string column"),
        ("id_column", options.id_column, _is_id, "a string or integer column"),
        ("max_new_tokens_column", options.max_new_tokens_column, _is_count, "an integer column"),
        ("num_tokens_column", options.num_tokens_column, _is_count, "an integer column"),
    ]
    wanted += [("passthrough", name, lambda kind: True, "any column") for name in options.passthrough]
    for option, column, is_right, what in wanted:
        if column is None:
            continue
        found = schema.get_all_field_indices(column)
        if not found:
            names = ", ".join(schema.names[:12]) + (", ..." if len(schema.names) > 12 else "")
            raise InputError(f"{file} has no column {column!r} (input.{option}); it has {names or 'none'}")
        if len(found) > 1:
            raise InputError(f"{file} has {len(found)} columns named {column!r} (input.{option}); rename all but one")
        kind = schema.field(found[0]).type
        if not is_right(kind):
            raise InputError(f"{file}: column {column!r} (input.{option}) is {kind}, it must be {what}")


def _read_ids(file: str, parquet: pq.ParquetFile, column: str | None) -> pa.ChunkedArray:
    """The ids of a file as strings, none without a column. Raises InputError for one that is null or not text."""
    if column is None:
        return pa.chunked_array([], pa.large_string())
    ids = parquet.read(columns=[column])[column]
    if ids.null_count:
        row = ids.is_null().to_numpy().argmax()
        raise InputError(
            f"{file}: nulls in column {column!r} (input.id_column): {ids.null_count:,}, the first in row {row}; "
            "every row needs an id"
        )
    try:
        return plain_text(ids)
    except pa.ArrowInvalid as error:
        raise InputError(f"{file}: column {column!r} (input.id_column) holds an id that is not UTF-8") from error


def _check_unique(ids: list[pa.ChunkedArray], listing: Listing) -> None:
    every = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.large_string())
    num_repeated = len(every) - len(every.unique())
    if not num_repeated:
        return
    counts = every.value_counts()
    repeated = counts.field("values")[int(np.argmax(counts.field("counts").to_numpy() > 1))].as_py()
    places = [
        f"{listing.relative_paths[number]} row {row}"
        for number, column in enumerate(ids)
        for row in _rows_with(column, repeated)
    ]
    raise InputError(
        f"ids must be unique over all files: {num_repeated:,} repeated, the first is {repeated!r} in "
        f"{' and '.join(places[:2])}"
    )


def _rows_with(column: pa.ChunkedArray, value: str) -> Iterator[int]:
    row = 0
    for chunk in column.chunks:
        for item in chunk:
            if item.as_py() == value:
                yield row
            row += 1


def _unify(fields: list[list[pa.Field]], options: InputOptions, listing: Listing) -> tuple[pa.Field, ...]:
    """One field per passthrough column; a column without values in one file takes its type from the others."""
    unified = []
    for position, column in enumerate(options.passthrough):
        kinds = [
            (file_fields[position].type, name) for file_fields, name in zip(fields, listing.relative_paths, strict=True)
        ]
        typed = [(kind, name) for kind, name in kinds if not pa.types.is_null(kind)]
        kind, first = (typed or [(pa.string(), "")])[0]  # no values anywhere: of a type that every reader takes
        for other, name in typed:
            if other != kind:
                raise InputError(
                    f"input.passthrough {column!r} is {kind} in {first} but {other} in {name}; make them one type"
                )
        unified.append(pa.field(column, kind))
    return tuple(unified)
