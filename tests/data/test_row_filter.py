"""The filter's grammar: what it matches, and that nothing else gets through."""

import datetime
import re

import pyarrow as pa
import pytest

from specextend.data.row_filter import RowFilter

DAYS = [datetime.date(2026, 11, day) for day in (20, 21, 22)] + [None]
TABLE = pa.table(
    {
        "lang": pa.array(["en", "de", None, "en"]).dictionary_encode(),
        "pages": [1, 2, 3, None],
        "day": DAYS,
        "public": [True, False, True, None],
        "at": pa.array([None] * 4, pa.timestamp("us", "UTC")),
        "uuid": pa.array([b"\x12" * 16, None, None, None], pa.uuid()),
        "a b": pa.array(["x", "y", "z", "x"], pa.string_view()),
        "meta": [{"land": "fr", "at": {"page": 1}}, {"land": "it", "at": None}, None, {"land": None, "at": None}],
    }
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("lang == 'en'", [0, 3]),
        ("not lang == 'en'", [1]),
        ("lang not in ('en', null)", [1]),
        ("lang is null or pages is null", [2, 3]),
        ("lang is not None and 1 < pages <= 3", [1]),
        ("pages >= 1.5 and not public", [1]),
        ("public", [0, 2]),
        ("at > '2026-11-23T22:00:00Z'", []),
        ("col('a b') == 'x' and pages > -1", [0]),
        ("meta.land != 'it'", [0]),
        ("uuid in ['12121212-1212-1212-1212-121212121212']", [0]),
        ("col('meta').at.page in [1, 2] or meta.land == 'it'", [0, 1]),
    ],
)
def test_rows_match_as_in_sql(text, rows):
    """A comparison with null is neither true nor false, so neither it nor its opposite matches."""
    assert RowFilter(text).mask(TABLE).nonzero()[0].tolist() == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lang = 'en'", "cannot be parsed"),
        ("meta.land = 'en'", "a.b a field of a struct"),
        ("'en'.land == 'x'", "which is not allowed"),
        ("", "cannot be parsed"),
        ("__import__('os').system('true')", "which is not allowed"),
        ("lang.upper() == 'EN'", "which is not allowed"),
        ("pages + 1 == 2", "which is not allowed"),
        ("lang is 'en'", "which is not allowed"),
        ("lang in other", "which is not allowed"),
        ("lang == null", "which is not allowed"),
    ],
)
def test_what_is_not_of_the_grammar_is_refused(text, message):
    """A configuration may come from somebody who must not run code here."""
    with pytest.raises(ValueError, match=message) as refused:
        RowFilter(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("pages == 'two'", "pages is int"),
        ("1 == 1", "it names none"),
        ("meta.lnd == 'x'", "meta is struct<land: string, at: struct<page: int64>>"),
        ("day > 'soon' and pages > 1", "day is date32[day], pages is int"),
        ("pages < 99999999999999999999", "pages is int"),
        ("at >= '2026-11-23T22:00:00'", "at is timestamp[us, tz=UTC]: write .* a time as '2026-11-23T22:00:00Z'"),
    ],
)
def test_a_filter_that_does_not_fit_its_columns_is_refused_with_their_types(text, types):
    """Arrow speaks of kernels; a number beyond 64 bits ended in a traceback."""
    with pytest.raises(
        ValueError, match=rf"does not fit its columns \(.*\); {re.escape(types).replace(re.escape('.*'), '.*')}"
    ) as refused:
        RowFilter(text).mask(TABLE)
    assert "\n" not in str(refused.value)
