"""Rows of a database that do not fit into its memory, and the filter of rows: nothing but a condition gets through."""

import re
import tempfile

import duckdb
import pyarrow as pa
import pytest

from specextend.data.database import Database, filter_columns, matches
from tests.refused import refused

FILL = "CREATE TABLE rows AS SELECT range AS n, hash(n) AS a, hash(n + 1) AS b, hash(n + 2) AS c FROM range(12_000_000)"
"""400 MB."""


def test_they_are_on_disk_and_gone_with_it(tmp_path, monkeypatch):
    """A driver ends with millions of rows, and has two gigabytes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    database = Database()
    database.select(FILL)
    assert {folder.stat().st_mode & 0o777 for folder in tmp_path.iterdir()} == {0o700}, "ids are nobody else's business"
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) > 20 << 20
    assert database.select("SELECT count(a) AS n, max(n) AS last FROM rows") == [{"n": 12_000_000, "last": 11_999_999}]
    del database
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_files_is_named(tmp_path, monkeypatch):
    """It is not the output folder that is full, and freeing that would not help."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    database = Database()
    [folder] = tmp_path.iterdir()
    folder.rmdir()
    folder.touch()
    with pytest.raises(OSError, match=r"has no room .*TMPDIR"):
        database.select(FILL)


TABLE = pa.table(
    {
        "lang": pa.array(["en", "de", None, "en"]).dictionary_encode(),
        "pages": [1, 2, 3, None],
        "day": pa.array([20000, 20001, 20002, None], "date32"),
        "public": [True, False, True, None],
        "since": pa.array([0, 1, 2, None], pa.timestamp("s", "Europe/Berlin")),
        "uuid": pa.array([b"\x12" * 16, None, None, None], pa.uuid()),
        "a b": pa.array(["x", "y", "z", "x"], "string_view"),
        "meta": [{"land": "fr", "at": {"page": 1}}, {"land": "it", "at": None}, None, {"land": None, "at": None}],
        "half": pa.array([1, 2, 3, 4], "float16"),
        "broken": pa.array([b"a", b"\xff", b"b", b"c"]).view("string"),
    }
)


@pytest.mark.parametrize(
    "text, rows",
    {
        "lang == 'en' -- and not another": [0, 3],
        "not lang = 'en'": [1],
        "lang not in ('en', null)": [],
        "lang is null or pages is null": [2, 3],
        "pages in [1, 3] and pages >= 1.5": [2],
        "public": [0, 2],
        "day > '2024-10-04' and year(day) == 2024": [1, 2],
        "since >= '1970-01-01T01:00:01+01:00' and since < '1970-01-01 00:00:02'": [1],
        "\"a b\" == 'x' and pages > -1": [0],
        "meta.at.page in (1, 2) or meta.land like 'i%'": [0, 1],
        "split_part(lower(lang), 'n', 1) = 'e' and round(pages / 2.0) = 1": [0],
        "coalesce(pages, 9)::VARCHAR in ('9', '3') and day + interval 1 day is not null": [2],
        "uuid == '12121212-1212-1212-1212-121212121212'": [0],
    }.items(),
)
def test_rows_match_as_in_sql(text, rows):
    """A comparison with null is neither true nor false, so neither it nor its opposite matches."""
    assert matches(text, TABLE.select(filter_columns(text))).nonzero()[0].tolist() == rows


@pytest.mark.parametrize(
    "text, message",
    {
        "lang = ": "syntax error",
        "": "names no column",
        "1 == 1": "names no column",
        "pages in (select 1)": "subquery is not allowed",
        "lang = (select content from read_text('/etc/passwd'))": "not allowed",
        "lang; drop table x": "syntax error",
        "row_number() over () < 3": "window is not allowed",
        "age(day) > interval 9 years": "age() is not allowed",
        "lang == repeat('x', 4000000000)": "repeat() is not allowed",
        "bit_count(bitstring(lang, 20000000)) > 0": "bitstring() is not allowed",
        "replace(lang, 'e', lang) = lang": "replace() is not allowed",
        "try_cast([pages] as int[100000]) is null": "a cast to array is not allowed",
        "list_filter([pages], lambda x: x > 1) = [2]": "lambda is not allowed",
        "len(array_agg(lang)) > 0": "array_agg() is not allowed",
        "LENGHT(lang) > 1": "lenght() is not allowed; did you mean length?",
        "pages > $1": "parameter is not allowed",
        "Lang == 'en' or lang == 'de'": "differ only in case",
    }.items(),
)
def test_what_reaches_beyond_a_row_is_refused(text, message):
    """A configuration may come from somebody who must not read files here; and a resumed run needs the same rows."""
    assert message in refused(filter_columns, text)


def test_no_function_of_several_rows_or_of_chance_is_allowed():
    """`len(array_agg(lang)) > 0` dropped 77 of 80 rows: functions are allowed by name. `today()` has no argument."""
    found = duckdb.sql(
        "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT' "
        "OR function_type IN ('aggregate', 'table', 'table_macro', 'window')"
    ).fetchall()
    assert len(found) > 150
    for [name] in found:
        for arguments in ("", "lang"):
            assert "() is not allowed" in refused(filter_columns, f'"{name}"({arguments}) = lang')


@pytest.mark.parametrize(
    "text, what",
    {
        "pages == 'two'": "'two'.* pages is int64",
        "lang": "lang is dictionary",
        "meta.lnd == 'x'": 'key "lnd".* meta is struct',
        "day > 'soon'": "'soon' .*day is date32",
        "half > 1": "half is halffloat",
        "broken == 'a'": "UTF8",
        "pages) from (select pages": "syntax error",
    }.items(),
)
def test_a_filter_that_does_not_fit_its_columns_is_refused_with_their_types(text, what):
    """Whatever DuckDB says becomes one line; text that is not UTF-8 would end its database."""
    said = refused(matches, text, TABLE.select(filter_columns(text)))
    assert re.search(f"does not fit its columns .*{what}", said)
