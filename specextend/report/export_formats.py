"""Tables of answers as files for other programs: Parquet, CSV and JSON Lines."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from specextend.data.parquet import is_text, plain_text, write_groups
from specextend.data.storage import Location, atomic_output

_DIGITS = {"s": 0, "ms": -3, "us": -6, "ns": -9}
_EXECUTED = r"^(\s*[=+@\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}-]|[\t\r])"
"""Beginnings of cells that a spreadsheet may execute."""


class Form(NamedTuple):
    """Format of a file."""

    kind: str
    """csv, jsonl or parquet."""
    columns: Sequence[str] = ()
    """Wanted columns in order; all if empty."""
    is_safe: bool = False
    """True for CSV that a spreadsheet does not execute."""


def format_of(place: Location) -> str | None:
    """Return the format by the ending of a file; None for a folder."""
    _, dot, ending = place.name.lower().rpartition(".")
    return ending if dot and ending in ("csv", *_WRITERS) else None


def write_answers(
    file: Location, form: Form, schema: pa.Schema, tables: Iterable[pa.Table]
) -> None:
    """Write a file, whole or not at all."""
    with atomic_output(file) as path:
        if form.kind == "csv":
            _write_csv(path, schema, tables, form.is_safe)
        else:
            _WRITERS[form.kind](path, schema, tables)


def _write_csv(path: str, schema: pa.Schema, tables: Iterable[pa.Table], is_safe: bool) -> None:
    with pa_csv.CSVWriter(path, _flat(schema.empty_table(), is_safe).schema) as writer:
        for table in tables:
            writer.write_table(_flat(table, is_safe))


def _write_json_lines(path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for table in tables:
            spelled = pa.table([*map(_spelled, table.columns)], table.column_names)
            file.writelines(_json(row) + "\n" for row in spelled.to_pylist())


_WRITERS = {"parquet": write_groups, "jsonl": _write_json_lines}


def _flat(table: pa.Table, is_safe: bool) -> pa.Table:
    """Write lists and structs as JSON, and put a ' before cells that a spreadsheet executes."""
    columns = []
    for column in map(_spelled, table.columns):
        _check_offsets(column)
        if column.type.num_fields:
            column = _as_text(column, _json)
        if is_safe and is_text(column.type):
            column = _harmless(column)
        columns.append(column)
    names = _harmless(pa.array(table.column_names)).to_pylist() if is_safe else table.column_names
    return pa.table(columns, names)


def _harmless(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    return pc.replace_substring_regex(texts, pattern=_EXECUTED, replacement=r"'\1")


def _spelled(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Write values as text if CSV or JSON has no form for them, with U+FFFD for invalid UTF-8."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _spelled(column.cast(kind.value_type))
    if kind.num_fields and "time64[ns]" in str(kind):  # Python's own have no nanoseconds
        raise ValueError(
            f"{kind} has nanoseconds inside, which only Parquet holds; export to .parquet"
        )
    if is_text(kind):
        try:
            return plain_text(column)
        except pa.ArrowInvalid:
            return _as_text(
                column.cast("large_binary"), lambda value: value.decode(errors="replace")
            )
    if pa.types.is_duration(kind):
        return _as_text(
            column.cast("int64"), lambda value: f"PT{Decimal(value).scaleb(_DIGITS[kind.unit]):f}S"
        )
    if kind in (pa.time64("ns"), pa.timestamp("ns", getattr(kind, "tz", None))):
        _check_offsets(column)
        return pc.replace_substring(column.cast("large_string"), pattern=" ", replacement="T")
    return (
        column
        if pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or kind.num_fields
        else _as_text(column, _text)
    )


def _check_offsets(column: pa.ChunkedArray) -> None:
    """Raise ValueError for an offset with seconds, which Arrow's text would lose."""
    kind = column.type
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return
    times = column.drop_null()
    local = pc.local_timestamp(times).cast("int64")
    offsets = pc.subtract(local, times.cast("int64")).to_numpy()
    if (offsets % (60 * 10 ** -_DIGITS[kind.unit])).any():
        raise ValueError(
            f"{kind} has times whose offset has seconds, as before time zones, which only Parquet "
            "holds; export to .parquet, or write the column in UTC"
        )


def _as_text(column: pa.ChunkedArray, spell: Callable[[Any], str]) -> pa.ChunkedArray:
    texts = [None if value is None else spell(value) for value in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, "large_string")])


def _json(value: Any) -> str:
    """Write a value as JSON: times as ISO 8601, bytes as Base64, NaN and infinity as null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_text, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(value, default=_text), parse_constant=lambda name: None)
        return json.dumps(finite, ensure_ascii=False)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return f"PT{Decimal(value // timedelta(microseconds=1)).scaleb(-6):f}S"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
