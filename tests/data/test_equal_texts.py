from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import DocumentKey
from specextend.data import equal_texts
from specextend.data.equal_texts import EqualRows, EqualTexts
from specextend.data.inputs import InputOptions
from specextend.data.selection import select_rows
from specextend.data.source import Source, open_source
from tests.properties.rows import in_a_folder

DRAWN = {
    "text": st.sampled_from(["a", "b", "", None]),
    "limit": st.sampled_from([None, None, 5, 0]),
    "ask": st.sampled_from([None, " ", "why?"]),
    "wanted": st.sampled_from([None, "", "c"]),
}
CONTENTS = st.fixed_dictionaries(DRAWN)
COLUMNS = ("id", *DRAWN, "lang")
SCHEMA = pa.schema([(name, pa.int32() if name == "limit" else pa.string()) for name in COLUMNS])


def scanned(source: Source) -> EqualTexts:
    equal = EqualTexts(source)
    for row in source.scan():
        equal.add(row)
    return equal


def source_of(folder: Path, files: list[list[dict[str, Any]]], **options: Any) -> Source:
    (folder / "in").mkdir()
    for file, rows in enumerate(files):
        named = [{"id": f"{file}-{row}"} | content for row, content in enumerate(rows)]
        pq.write_table(pa.Table.from_pylist(named, SCHEMA), folder / "in" / f"{file}.parquet", row_group_size=3)
    columns = {"max_new_tokens_column": "limit", "instruction_column": "ask", "reference_column": "wanted"}
    chosen = InputOptions(path=str(folder / "in"), id_column="id", **columns, **options)
    return select_rows(open_source(chosen)) if chosen.selects else open_source(chosen)


def asked(content: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What a row asks for; None if it will be refused."""
    if not content["text"] or content["limit"] == 0:
        return None
    return content["text"], content["limit"], (content["ask"] or "").strip(), content["wanted"]


@settings(max_examples=40)
@given(data=st.data(), files=st.lists(st.lists(CONTENTS, max_size=12), min_size=1, max_size=3))
def test_of_the_open_rows_that_ask_for_the_same_the_first_is_decoded(
    data: st.DataObject, files: list[list[dict[str, Any]]]
) -> None:
    """In any arrangement, of any rows that are left to do; of many equal ones another is decoded after each batch."""
    contents = {DocumentKey(f, r): content for f, rows in enumerate(files) for r, content in enumerate(rows)}
    open_keys = {key for key in contents if data.draw(st.integers(0, 3), label=str(key))}
    groups = defaultdict(list)
    for key in sorted(open_keys):
        if (what := asked(contents[key])) is not None:
            groups[what].append(key)
    wanted = {}
    for keys in groups.values():
        for begin in range(0, len(keys), 3):
            first, *others = keys[begin : begin + 3]
            wanted |= {first: [(key, f"{key.file}-{key.row}") for key in others]} if others else {}

    def check(folder: Path) -> None:
        source = source_of(folder, files)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(equal_texts, "MAX_COPIES", 2)
            found = scanned(source)
            again = EqualTexts(source, found.table()).among(open_keys)
            assert dict(found.among(open_keys)) == dict(again) == wanted
            assert again.num_rows == sum(map(len, wanted.values()))

    in_a_folder(check)


def test_rows_of_a_selection_are_equal_to_rows_of_it_alone(tmp_path: Path) -> None:
    """What the run is not about is not decoded, so nothing can be copied from it. A file without a row is left out."""
    rows = [{"text": text, "lang": lang} for text, lang in (("a", "fr"), ("b", "en"), ("a", "en"), ("a", "en"))]
    source = source_of(tmp_path, [rows[:1], rows, rows[1:]], filter="lang == 'en'")
    keys = [DocumentKey(file.number, row) for file in source.files for row in source.rows(file.number)]
    assert dict(scanned(source).among(keys)) == {
        DocumentKey(0, 1): [(DocumentKey(1, 0), "2-0")],
        DocumentKey(0, 2): [(DocumentKey(0, 3), "1-3"), (DocumentKey(1, 1), "2-1"), (DocumentKey(1, 2), "2-2")],
    }


def test_texts_that_are_not_read_are_equal_to_none(tmp_path: Path) -> None:
    """A column of token counts spares the plan the texts, and so nothing is known of them."""
    pq.write_table(pa.table({"text": ["a", "a"], "tokens": [1, 1]}), tmp_path / "in.parquet")
    source = open_source(InputOptions(path=str(tmp_path / "in.parquet"), num_tokens_column="tokens"))
    assert scanned(source).among([DocumentKey(0, 0), DocumentKey(0, 1)]) == EqualRows.none() == {}
