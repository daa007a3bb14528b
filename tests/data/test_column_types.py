"""Whatever Parquet can hold passes through with its type and its values."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.source import open_source
from specextend.data.storage import Location

NUM_ROWS = 700
"""More than one batch of reading, so that values of two batches must fit together."""

NESTED = pa.struct(
    [("title", pa.string()), ("tags", pa.list_(pa.struct([("name", pa.large_string()), ("at", pa.int8())])))]
)

COLUMNS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "string": (pa.string(), lambda i: f"text {i}"),
    "string_view": (pa.string_view(), lambda i: f"a text of more than twelve bytes {i}"),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), lambda i: f"category {i // 300}"),
    "small_dictionary": (pa.dictionary(pa.int8(), pa.large_string()), lambda i: f"category {i // 300}"),
    "column.with.dots": (pa.string(), lambda i: f"text {i % 3}"),
    "binary": (pa.binary(), lambda i: bytes([i % 256, 255])),
    "fixed_size_binary": (pa.binary(4), lambda i: i.to_bytes(4, "big")),
    "uint64": (pa.uint64(), lambda i: 2**64 - 1 - i),
    "float16": (pa.float16(), lambda i: i / 2),
    "decimal": (pa.decimal128(20, 3), lambda i: Decimal(i) / 8),
    "date": (pa.date32(), lambda i: datetime.date(2026, 1, 1) + datetime.timedelta(days=i)),
    "timestamp": (pa.timestamp("us", "Europe/Berlin"), lambda i: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)),
    "large_list": (pa.large_list(pa.float64()), lambda i: [i / 3] * (i % 3)),
    "fixed_size_list": (pa.list_(pa.float32(), 3), lambda i: [i, i + 1, i + 2]),
    "map": (pa.map_(pa.string(), pa.int64()), lambda i: [(f"key {i}", i)]),
    "nested": (NESTED, lambda i: {"title": f"t{i}", "tags": [{"name": "n", "at": i % 100}] * (i % 3)}),
    "nothing": (pa.null(), lambda i: None),
}


def test_passthrough_keeps_types_and_values(tmp_path: Path, output: Location, done: Callable[..., Any]) -> None:
    """A null in every seventh row. A column that holds nothing else comes out as text, which every reader takes."""
    values = {name: [None if i % 7 == 6 else make(i) for i in range(NUM_ROWS)] for name, (_, make) in COLUMNS.items()}
    table = pa.table({name: pa.array(values[name], kind) for name, (kind, _) in COLUMNS.items()})
    text = pa.table({"text": [f"document {i}" for i in range(NUM_ROWS)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table.append_column("text", text["text"]), path, compression="zstd", row_group_size=300)
    source = open_source(InputOptions(path=str(path), passthrough=tuple(COLUMNS)))
    CommitWriter(output, "0000000a").commit([done(0, row) for row in range(NUM_ROWS)])
    finalize(source, output)
    written = pq.read_table(f"{output.path}/summaries/part-00000.parquet")
    for name in COLUMNS:
        expected = table[name].cast(pa.string()) if name == "nothing" else pq.read_table(path, columns=[name])[name]
        assert written[name].type == expected.type, name
        assert written[name].to_pylist() == expected.to_pylist(), name


@pytest.mark.parametrize("encoding", ["PLAIN", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()], ids=str)
def test_text_is_read_in_every_encoding(
    tmp_path: Path, output: Location, done: Callable[..., Any], encoding: str, kind: pa.DataType
) -> None:
    """Text is read as a dictionary, which pyarrow cannot do of every encoding."""
    texts = [None if i % 7 == 6 else f"{i % 5} of {i}" * (i % 40 + 1) for i in range(NUM_ROWS)]
    options = {"use_dictionary": encoding == "RLE_DICTIONARY"}
    if encoding != "RLE_DICTIONARY":
        options["column_encoding"] = {"text": encoding}
    pq.write_table(pa.table({"text": pa.array(texts, kind)}), tmp_path / "a.parquet", row_group_size=300, **options)
    source = open_source(InputOptions(path=str(tmp_path / "a.parquet"), passthrough=("text",)))
    assert [row.text and row.text.decode() for row in source.scan()] == texts
    for row in range(0, NUM_ROWS, 7):
        assert source.read(DocumentKey(0, row)).document.text == texts[row]
    CommitWriter(output, "0000000a").commit([done(0, row) for row in range(NUM_ROWS)])
    finalize(source, output)
    written = pq.read_table(f"{output.path}/summaries/part-00000.parquet")["text"]
    assert (written.type, written.to_pylist()) == (kind, texts)
