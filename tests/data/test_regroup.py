"""Reading one document must not mean reading a gigabyte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.core import DocumentKey
from specextend.data.inputs import DocumentError, InputOptions
from specextend.data.parquet import stream
from specextend.data.regrouping import regroup
from specextend.data.source import Source, open_source
from specextend.data.storage import Location

Write = Callable[..., Path]
NOT_UTF8 = pa.array([b"\xff\xfe"]).cast(pa.string(), safe=False)


SMALL = 64 << 10
"""A limit for row groups in kilobytes."""


def regrouped(source: Source, output: Location) -> Source:
    return regroup(source, output, max_group_bytes=SMALL)


def texts(source: Source) -> list[str]:
    return [source.read(DocumentKey(0, row)).document.text for row in range(source.num_rows)]


def test_a_row_group_over_64_mib_is_rewritten_in_groups_of_16(tmp_path: Path, output: Location) -> None:
    lines = [f"{number:09d}\n" * 1_000_000 for number in range(7)]
    table = pa.table({"text": lines, "other": range(7)})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    source = open_source(InputOptions(path=str(tmp_path / "a.parquet")))
    copied = regroup(source, output)
    metadata = pq.read_metadata(f"{output.path}/_run/input/file-00000.parquet")
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    assert len(sizes) == 7
    assert max(sizes) <= 17 << 20
    assert copied.read(DocumentKey(0, 6)).document.text == lines[6]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_keys_ids_and_errors_stay_the_same(write: Write, output: Location, kind: pa.DataType) -> None:
    text = pa.array([f"{i} " * (1 + i * 50) for i in range(60)] + [None]).cast(kind)
    path = write("a.parquet", {"text": text, "id": range(61), "limit": [9] * 61}, group_rows=61)
    source = open_source(InputOptions(path=str(path), id_column="id", max_new_tokens_column="limit"))
    copied = regrouped(source, output)
    assert copied is not source
    assert len(copied.copies[0].group_rows) > 4
    assert list(copied.scan()) == list(source.scan())
    for row in range(60):
        assert copied.read(DocumentKey(0, row)) == source.read(DocumentKey(0, row))
    with pytest.raises(DocumentError, match="NullText"):
        copied.read(DocumentKey(0, 60))


def test_text_that_is_not_utf8_is_copied_as_it_is(write: Write, output: Location) -> None:
    path = write("a.parquet", {"text": pa.concat_arrays([NOT_UTF8, pa.array(["x" * 99_000])])})
    copied = regrouped(open_source(InputOptions(path=str(path))), output)
    with pytest.raises(DocumentError, match="UndecodableText"):
        copied.read(DocumentKey(0, 0))


def test_only_the_columns_of_a_document_count_and_are_copied(write: Write, output: Location) -> None:
    path = write("a.parquet", {"text": ["x"], "scan": [b"y" * (17 << 20)]})
    source = open_source(InputOptions(path=str(path), passthrough=("scan",)))
    assert regrouped(source, output) is source
    assert not os.path.exists(output.path)


def test_a_column_with_dots_in_its_name_counts(write: Write, output: Location) -> None:
    """Its name looks like a path into another column, and it was taken for no bytes at all."""
    path = write("a.parquet", {"a.text": [f"{i}" * 300_000 for i in range(60)], "a": ["y"] * 60}, group_rows=60)
    copied = regrouped(open_source(InputOptions(path=str(path), text_column="a.text")), output)
    assert len(copied.copies[0].group_rows) > 5
    assert copied.read(DocumentKey(0, 59)).document.text == "59" * 300_000


@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
def test_what_counts_is_what_reading_takes(tmp_path: Path, output: Location, encoding: str) -> None:
    """A repeated text is held once where it is in a dictionary, and as often as it is there where it is a prefix."""
    options = {"column_encoding": {"text": encoding}} if encoding == "DELTA_BYTE_ARRAY" else {}
    table = pa.table({"text": ["a text " * 500] * 60})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=not options, **options)
    source = open_source(InputOptions(path=str(tmp_path / "a.parquet")))
    assert (source.files[0].largest_group_bytes > 60 * 3500) is bool(options)
    assert (regrouped(source, output) is source) is not bool(options)


def test_a_column_that_turns_out_not_to_be_a_dictionary_is_read_from_there_on(tmp_path: Path) -> None:
    """Some writers begin with one encoding and go on with another."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(1000)]}), path)

    class TurnsOut(pq.ParquetFile):
        def iter_batches(self, *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
            yield next(super().iter_batches(*arguments, **options))
            raise OSError("Not yet implemented: DecodeArrow")

    tables = stream(TurnsOut(path), ["text"], plain=lambda: pq.ParquetFile(path))
    assert [text for table in tables for text in table["text"].to_pylist()] == [f"text {row}" for row in range(1000)]


def test_a_whole_copy_is_used_again_and_a_broken_or_foreign_one_is_not(write: Write, output: Location) -> None:
    path = write("a.parquet", {"text": [f"{i}" * 40_000 for i in range(3)]}, group_rows=3)
    source = open_source(InputOptions(path=str(path)))
    expected = texts(regrouped(source, output))
    copy = Path(f"{output.path}/_run/input/file-00000.parquet")
    written = copy.stat().st_mtime_ns
    regrouped(source, output)
    assert copy.stat().st_mtime_ns == written
    copy.write_bytes(copy.read_bytes()[:-10])
    assert texts(regrouped(source, output)) == expected
    path = write("a.parquet", {"text": [f"{i}" * 50_000 for i in (7, 8, 9)]}, group_rows=3)
    assert texts(regrouped(open_source(InputOptions(path=str(path))), output))[0].startswith("7")
