"""Which columns of a Parquet file hold the text and the id: a guess with its reason, to begin a configuration with."""

import re
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specextend.core import counted
from specextend.data.inputs import InputError, unreadable
from specextend.data.listing import Listing, list_input
from specextend.data.parquet import (
    BATCH_BYTES,
    is_bytes,
    is_id,
    is_text,
    open_parquet,
    plain_leaves,
    plain_text,
    read_file,
    stream,
    way_out,
)

SAMPLE_ROWS = 200
_MOST_FILES = 8
"""Files whose columns are compared."""
_ID_CHARACTERS, _ID_ROWS = 64, 10
"""Characters at most, on average, and rows at least, with which a column is an id without being named as one."""
_TEXT_NAMES = re.compile(
    r"((full|raw|plain)_?)?(text|content|body|document|doc|article|report|html|page|passage|transcript|story)s?", re.I
)
_ID_NAMES = re.compile(r"(^|_)(id|uuid|guid|key|doi|url|path|file|filename|name|number|no)$|Id$|ID$")


class Guess(NamedTuple):
    """The columns of an input by their use, and why."""

    text: str
    why_text: str
    id: str | None
    why_id: str
    others: tuple[str, ...]
    differs: str
    """How the columns of another file differ, in one line; empty if they do not in those looked at."""


def guess_columns(path: str) -> Guess:
    """Look at the first rows of the first file, and at the footers of a few more.

    Raises InputError if there is no file, no column holds text, or what looks like the text has a type that is none.
    """
    listing = list_input(path)
    name = listing.relative_paths[0]

    def read(file: pa.NativeFile) -> tuple[pa.Schema, pa.Table]:
        parquet = open_parquet(file)
        schema = parquet.schema_arrow
        return schema, _first_rows(parquet)

    schema, batch = read_file(listing.root.child(name), read, partial(unreadable, name), listing.sizes[0])
    columns = dict(zip(schema.names, batch.columns, strict=True))
    values = {name: _comparable(column) for name, column in columns.items() if is_id(column.type)}
    lengths = {name: _mean_length(column) for name, column in columns.items()}
    text = max(lengths, key=lengths.__getitem__, default="")
    if not lengths or not lengths[text]:
        raise InputError(f"{name} has no column of texts; it has {', '.join(schema.names)}")
    for column in [text, *filter(_TEXT_NAMES.fullmatch, columns)]:
        kind = columns[column].type
        if is_bytes(kind) or kind.num_fields:
            cast = way_out(column, kind, "VARCHAR") or "; join its parts to one string when you write the Parquet"
            raise InputError(f"{name}: column {column!r} looks like the text, but is {kind}, not a string{cast}")
    rows = f"the first {counted(len(values[text]), 'row')} of {name}"
    unique = [column for column in values if column != text and _is_unique(values[column])]
    named = [column for column in unique if _ID_NAMES.search(column)]
    found = min(named, key=lambda column: (column.lower() != "id", not column.lower().endswith("id")), default=None)
    why = f"named as an id, unique and never null in {rows}" if found else "no column is named as an id and unique"
    if not found and len(values[text]) >= _ID_ROWS:  # the shortest texts, and before them integers
        short = [column for column in unique if lengths.get(column, 0) <= _ID_CHARACTERS]
        found = min(short, key=lambda column: lengths.get(column, 0), default=None)
        why = f"unique in {rows}" if found else why
    spoilt = [column for column in values if _ID_NAMES.search(column) and column not in unique]
    if spoilt and found not in named:
        why += f"; {spoilt[0]} is named as one, but has nulls or repeats: input.on_bad_id: error takes it nevertheless"
    others = tuple(column for column in schema.names if column not in (text, found))
    why_text = f"the longest texts: {lengths[text]:,.0f} characters on average in {rows}"
    return Guess(text, why_text, found, why, others, _difference(listing, schema))


def _first_rows(parquet: pq.ParquetFile) -> pa.Table:
    """Return the first rows of a file, fewer if they are large."""
    tables = [parquet.schema_arrow.empty_table()]
    for table in stream(parquet, parquet.schema_arrow.names):
        tables.append(table)
        if sum(map(len, tables)) >= SAMPLE_ROWS or sum(each.nbytes for each in tables) >= BATCH_BYTES:
            break
    return pa.concat_tables(tables).slice(0, SAMPLE_ROWS)


def _difference(listing: Listing, schema: pa.Schema) -> str:
    """Say how the columns of the first file that differs do; empty if none does. Raises InputError if it is damaged."""
    for name, size in [*zip(listing.relative_paths, listing.sizes, strict=True)][1:_MOST_FILES]:
        found: pa.Schema = read_file(listing.root.child(name), pq.read_schema, partial(unreadable, name), size)
        theirs, ours = _only(found, schema), _only(schema, found)
        if theirs or ours:
            theirs, ours = theirs or "nothing else", ours or "nothing else"
            return f"{name} has {theirs}, {listing.relative_paths[0]} {ours}; a run needs the columns it uses in all"
    return ""


def _only(schema: pa.Schema, other: pa.Schema) -> str:
    """Name the columns that another schema lacks, or has with another type."""
    others = dict(zip(other.names, other.types, strict=True))
    return ", ".join(f"{field.name} ({field.type})" for field in schema if others.get(field.name) != field.type)


def _mean_length(values: pa.ChunkedArray) -> float:
    """Return the mean number of characters in the strings of a column, also of those in lists and structs.

    Bytes count as the text that they are in UTF-8; other bytes, such as those of images, do not.
    """
    total = 0
    for leaf in (leaf for chunk in values.chunks for leaf in plain_leaves(chunk)):
        if not is_bytes(leaf.type) and not is_text(leaf.type):
            continue
        stored = leaf.cast(pa.large_binary())
        try:
            lengths = pc.utf8_length(stored.cast(pa.large_string()))
        except pa.ArrowInvalid:
            if is_bytes(leaf.type):
                continue
            lengths = pc.binary_length(stored)
        total += pc.sum(lengths).as_py() or 0
    return total / max(1, len(values))


def _comparable(values: pa.ChunkedArray) -> list[Any]:
    """Return the values of a possible id; text as bytes, which need not be UTF-8."""
    spelled = values.cast(pa.large_binary()) if is_text(values.type) else plain_text(values)
    return list(spelled.to_pylist())


def _is_unique(values: list[Any]) -> bool:
    return None not in values and len(set(values)) == len(values) and b"" not in values
