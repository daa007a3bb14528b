"""The formulas beside right answers: known values, and what must always hold."""

import json
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from math import comb, nan

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.data.schema import text_columns
from specextend.data.storage import resolve
from specextend.report.gold import bootstrap, calibration, check_gold, gold_figures, kappa, mcnemar
from specextend.report.intervals import wilson

COUNTS = st.integers(0, 60)


@pytest.mark.parametrize(
    "right, rows, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilsons_interval_is_that_of_the_books(right, rows, low, high):
    """Newcombe (1998) has the last one."""
    assert wilson(right / rows, rows) == pytest.approx([low, high], abs=1e-4)


def test_kappa_is_that_of_the_books():
    """Cohen's own example of two raters, and raters who agree by chance alone."""
    pairs = {("yes", "yes"): 20, ("yes", "no"): 5, ("no", "yes"): 10, ("no", "no"): 15}
    assert kappa(pairs) == pytest.approx(0.4)
    assert kappa(dict.fromkeys([(one, other) for one in "ab" for other in "ab"], 5)) == pytest.approx(0)
    assert kappa({("a", "a"): 3}) is None


def test_answers_are_grouped_by_confidence_and_the_least_certain_come_first():
    """Each in one group, of equal sizes; too few for two groups say nothing."""
    judged = [(-number / 10, number % 3 == 0) for number in range(47)]
    groups = calibration(judged)
    assert [group["rows"] for group in groups] == [12, 12, 12, 11]
    assert [group["probability"] for group in groups] == sorted(group["probability"] for group in groups)
    assert sum(group["rows"] * group["accuracy"] for group in groups) == pytest.approx(
        sum(right for _, right in judged)
    )
    assert all(group["interval"][0] < group["accuracy"] < group["interval"][1] for group in groups)
    assert calibration(judged[:19]) == []


@given(COUNTS, COUNTS)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_mcnemars_test_sums_the_binomial_tails(gained, lost):
    total = gained + lost
    tail = sum(comb(total, number) for number in range(min(gained, lost) + 1)) / 2**total
    assert mcnemar(gained, lost) == pytest.approx(min(1, 2 * tail))
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


@given(st.lists(st.sampled_from([(1, 0), (0, 1), (0, 0)]), min_size=1, max_size=80))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_a_bootstrap_holds_the_difference_between_its_ends(changes):
    found = Counter(changes)
    low, high = bootstrap(found[1, 0], found[0, 1], len(changes))
    difference = (found[1, 0] - found[0, 1]) / len(changes)
    assert -1 <= low <= difference <= high <= 1


PROPERTIES = {"n": "integer", "share": "number", "said": "string", "closed": "boolean"}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in PROPERTIES.items()},
        "required": [*PROPERTIES],
        "additionalProperties": False,
    }
)
DAY = datetime(2024, 1, 31)


@pytest.mark.parametrize(
    "field, answer, gold, expected",
    [
        ("n", 3, pa.array([Decimal("3.00")]), (1, 1)),
        ("n", 100, pa.array([100.0]), (1, 1)),
        ("n", 9007199254740993, pa.array([9007199254740992]), (0, 1)),
        ("share", 0.1, pa.array([0.1], "float32"), (1, 1)),
        ("share", 0.5, pa.array([0.5], "float16"), (1, 1)),
        ("share", -0.0, pa.array([0]), (1, 1)),
        ("share", 0.1, pa.array([nan]), None),
        ("share", nan, pa.array([0.1]), (0, 1)),
        ("said", "2024-01-31", pa.array([date(2024, 1, 31)]), (1, 1)),
        ("said", "2024-01-31", pa.array([DAY], pa.timestamp("ns")), (1, 1)),
        ("said", "2024-01-31", pa.array([DAY.replace(tzinfo=UTC)], pa.timestamp("us", "UTC")), (1, 1)),
        ("said", "2024-01-31", pa.array([DAY.replace(hour=1)]), (0, 1)),
        ("said", "29349-01-26", pa.array([10**7], "date32"), (1, 1)),
        ("said", "caf\ufffd", pa.array([b"Caf\xe9 "]).view("string"), (1, 1)),
        ("said", "Audit", pa.array(["audit"]).dictionary_encode(), (1, 1)),
        ("closed", True, pa.array(["true"]), (1, 1)),
    ],
)
def test_an_answer_is_right_by_its_value_whatever_the_type_of_the_right_one(tmp_path, field, answer, gold, expected):
    """Right answers and rows."""
    config = {"input": {"gold": {field: "known"}}, "output": {"column": "answer", "schema": SCHEMA}}
    types = {"n": "int64", "share": "float64", "said": "string", "closed": "bool"}
    check_gold({field: "known"}, [pa.field("known", gold.type)], text_columns(config))
    (tmp_path / "summaries").mkdir()
    table = pa.table({"doc_id": ["a"], field: pa.array([answer], types[field]), "known": gold})
    pq.write_table(table, tmp_path / "summaries" / "part-00000.parquet")
    found = gold_figures(resolve(str(tmp_path)), {"config": config})
    assert found == {} if expected is None else (found[field]["right"], found[field]["rows"]) == expected


@pytest.mark.parametrize("kind", [pa.binary(), pa.time32("s"), pa.duration("s"), pa.list_(pa.string())])
def test_right_answers_of_types_that_cannot_be_compared_are_refused_by_name(kind):
    columns = text_columns({"output": {"schema": SCHEMA}})
    with pytest.raises(ValueError, match=r"input.gold: known is .*, but only"):
        check_gold({"said": "known"}, [pa.field("known", kind)], columns)
