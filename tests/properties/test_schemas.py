"""Columns that are not ours come out as they went in, whatever their type and however they were stored."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import DocumentKey
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.parts import PartWriter
from specextend.data.schema import SUMMARY_SCHEMA
from specextend.data.source import open_source
from specextend.data.storage import resolve
from tests.properties.rows import done, failed, in_a_folder

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
DATES = st.dates(datetime.date(1900, 1, 1), datetime.date(2100, 1, 1))
TIMES = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1))
PLAIN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), st.binary(max_size=12)),
    (pa.large_binary(), st.binary(max_size=12)),
    (pa.date32(), DATES),
    (pa.timestamp("us"), TIMES),
    (pa.timestamp("us", tz="UTC"), TIMES.map(lambda time: time.replace(tzinfo=datetime.UTC))),
    (pa.decimal128(12, 2), st.integers(-(10**9), 10**9).map(lambda cents: Decimal(cents) / 100)),
    (pa.dictionary(pa.int32(), pa.string()), TEXT),
]
Column = tuple[pa.DataType, st.SearchStrategy[Any]]


def nested(inner: st.SearchStrategy[Column]) -> st.SearchStrategy[Column]:
    """Lists, structs and maps of what there is."""
    return st.one_of(
        inner.map(lambda of: (pa.list_(of[0]), st.lists(st.none() | of[1], max_size=3))),
        inner.map(lambda of: (pa.large_list(of[0]), st.lists(st.none() | of[1], max_size=3))),
        st.tuples(inner, inner).map(
            lambda of: (
                pa.struct([("first", of[0][0]), ("second", of[1][0])]),
                st.fixed_dictionaries({"first": st.none() | of[0][1], "second": st.none() | of[1][1]}),
            )
        ),
        inner.map(
            lambda of: (pa.map_(pa.string(), of[0]), st.dictionaries(TEXT, st.none() | of[1], max_size=3).map(pairs))
        ),
    )


def pairs(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """A map's entries, as Arrow takes and gives them."""
    return list(values.items())


NOT_NESTED = st.sampled_from(PLAIN)
CAN_NEST = NOT_NESTED.filter(lambda of: not (pa.types.is_dictionary(of[0]) or pa.types.is_string_view(of[0])))
"""pyarrow writes neither a dictionary nor a string view inside another type."""
KINDS = st.recursive(CAN_NEST, nested, max_leaves=4) | NOT_NESTED
STORED = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy", "zstd", "gzip", "lz4"]),
        "row_group_size": st.integers(1, 9),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
    }
)


@settings(max_examples=60)
@given(st.data(), st.lists(KINDS, min_size=1, max_size=3), st.integers(0, 9), STORED)
def test_passthrough_columns_keep_type_and_values(
    data: st.DataObject, kinds: list[Column], num_rows: int, stored: dict[str, Any]
) -> None:
    """They are somebody's keys and labels: a value that is nearly the same is lost."""
    columns = {
        f"column {number}": pa.array(
            data.draw(st.lists(st.none() | values, min_size=num_rows, max_size=num_rows)), kind
        )
        for number, (kind, values) in enumerate(kinds)
    }
    table = pa.table({"text": pa.array(["x"] * num_rows, pa.string()), **columns})
    is_bad = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))

    def check(folder: Path) -> None:
        pq.write_table(table, folder / "input.parquet", **stored)
        source = open_source(InputOptions(path=str(folder / "input.parquet"), passthrough=tuple(columns)))
        output = resolve(str(folder / "output"))
        keys = [DocumentKey(0, row) for row in range(num_rows)]
        rows = [failed(key) if bad else done(key) for key, bad in zip(keys, is_bad, strict=True)]
        PartWriter(output, "0000000a").commit(rows)
        finalize(source, output)
        found = pq.read_table(folder / "output" / "summaries" / "part-00000.parquet")
        as_stored = pq.read_table(folder / "input.parquet").select(list(columns))
        kept = [row for row, bad in zip(as_stored.to_pylist(), is_bad, strict=True) if not bad]
        assert found.column_names == [*SUMMARY_SCHEMA.names, *columns]
        assert found.select(list(columns)).schema.equals(as_stored.schema)
        assert found.select(list(columns)).to_pylist() == kept

    in_a_folder(check)


@settings(max_examples=40)
@given(
    st.lists(st.none() | st.binary(max_size=40), max_size=9), st.sampled_from(["text", "large", "view", "dictionary"])
)
def test_every_row_is_a_document_or_says_why_not(texts: list[bytes | None], stored_as: str) -> None:
    """Bytes that are no UTF-8 are one row's trouble: reading the rows beside it must not notice."""
    kinds = {"text": pa.string(), "large": pa.large_string(), "view": pa.string_view(), "dictionary": pa.string()}
    binary = {"large": pa.large_binary(), "view": pa.binary_view()}.get(stored_as, pa.binary())
    column = pa.array(texts, binary).view(kinds[stored_as])
    if stored_as == "dictionary":
        column = column.dictionary_encode()

    def check(folder: Path) -> None:
        pq.write_table(pa.table({"text": column}), folder / "input.parquet", row_group_size=2)
        source = open_source(InputOptions(path=str(folder / "input.parquet")))
        classes = [row.error_class for row in source.scan()]
        assert classes == [expected_class(text) for text in texts]

    in_a_folder(check)


def expected_class(text: bytes | None) -> str | None:
    """By Python's own decoder."""
    if text is None:
        return "NullText"
    try:
        return None if text.decode().strip() else "EmptyText"
    except UnicodeDecodeError:
        return "UndecodableText"
