"""The formulas beside right answers: known values, and what must always hold."""

from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from math import nan

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.data.answers import schema_of
from specextend.data.schema import text_columns
from specextend.data.storage import resolve
from specextend.report.gold import bootstrap, check_gold, gold_figures, mcnemar, wilson
from tests.report.made_up import write_part


@pytest.mark.parametrize(
    "right, rows, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilsons_interval_is_that_of_the_books(right, rows, low, high):
    """Newcombe (1998) has the last one."""
    assert wilson(right / rows, rows) == pytest.approx([low, high], abs=1e-4)


@pytest.mark.parametrize(
    "gained, lost, p", [(0, 0, 1), (0, 6, 2 / 64), (8, 2, 112 / 1024), (2, 8, 112 / 1024), (5, 5, 1)]
)
def test_mcnemars_test_sums_the_binomial_tails(gained, lost, p):
    """Of ten rows that changed sides, 1 + 10 + 45 of 1,024 outcomes are as far on one side as two."""
    assert mcnemar(gained, lost) == pytest.approx(p)


@given(st.lists(st.sampled_from([(1, 0), (0, 1), (0, 0)]), min_size=1, max_size=80))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_a_bootstrap_holds_the_difference_between_its_ends(changes):
    found = Counter(changes)
    low, high = bootstrap(found[1, 0], found[0, 1], len(changes))
    difference = (found[1, 0] - found[0, 1]) / len(changes)
    assert -1 <= low <= difference <= high <= 1


SCHEMA = schema_of({"n": "integer", "share": "number", "said": "string", "closed": "boolean"})
DAY = datetime(2024, 1, 31)
TYPES = {"n": "int64", "share": "float64", "said": "string", "closed": "bool"}


def found_of(folder, field, answers, gold, confidences=None):
    """What the report says of answers to a field."""
    output = {"column": "answer", "schema": SCHEMA, "confidence": confidences is not None}
    config = {"input": {"gold": {field: "known"}}, "output": output}
    check_gold({field: "known"}, [pa.field("known", gold.type)], text_columns(config))
    ids = [str(row) for row in range(len(answers))]
    table = pa.table({"doc_id": ids, field: pa.array(answers, TYPES[field]), "known": gold})
    if confidences is not None:
        table = table.append_column("confidence", pa.array([{field: each} for each in confidences]))
    write_part(folder / "summaries", table)
    return gold_figures(resolve(str(folder)), {"config": config}).get(field)


@pytest.mark.parametrize("counts, kappa", [([20, 5, 10, 15], 0.4), ([5] * 4, 0), ([3, 0, 0, 0], None)])
def test_kappa_is_that_of_the_books(tmp_path, counts, kappa):
    """Cohen's own example of two raters, the first one; agreement by chance; a single label."""
    gold, answers = np.repeat([(True, True), (True, False), (False, True), (False, False)], counts, axis=0).T
    found = found_of(tmp_path, "closed", answers, pa.array(gold))
    assert found["kappa"] == (None if kappa is None else pytest.approx(kappa))


def test_answers_are_grouped_by_confidence_and_the_least_certain_come_first(tmp_path):
    """Each in one group, of equal sizes; too few for two groups say nothing."""
    answers = [number % 3 == 0 for number in range(48)]
    sure = [*(-number / 10 for number in range(47)), None]
    found = found_of(tmp_path, "closed", answers, pa.array([True] * 48), sure)
    groups = found["calibration"]
    assert [group["rows"] for group in groups] == [12, 12, 12, 11]
    assert [group["probability"] for group in groups] == sorted(group["probability"] for group in groups)
    assert sum(group["rows"] * group["accuracy"] for group in groups) == pytest.approx(sum(answers[:47]))
    assert all(group["interval"][0] < group["accuracy"] < group["interval"][1] for group in groups)
    assert found_of(tmp_path / "few", "closed", answers[:19], pa.array([True] * 19), sure[:19])["calibration"] == []


@pytest.mark.parametrize(
    "field, answer, gold, kind, expected",
    [
        ("n", 3, Decimal("3.00"), None, 1),
        ("n", 100, 100.0, None, 1),
        ("n", 9007199254740993, 9007199254740992, None, 0),
        ("share", 0.1, 0.1, "float32", 1),
        ("share", 0.5, 0.5, "float16", 1),
        ("share", -0.0, 0, None, 1),
        ("share", 0.1, nan, None, None),
        ("share", nan, 0.1, None, 0),
        ("said", "2024-01-31", date(2024, 1, 31), None, 1),
        ("said", "2024-01-31", DAY, pa.timestamp("ns"), 1),
        ("said", "2024-01-31", DAY.replace(tzinfo=UTC), pa.timestamp("us", "UTC"), 1),
        ("said", "2024-01-31", DAY.replace(hour=1), None, 0),
        ("said", "29349-01-26", 10**7, "date32", 1),
        ("said", "caf\ufffd", b"Caf\xe9 ", None, 1),
        ("said", "Audit", "audit", pa.dictionary("int32", "string"), 1),
        ("closed", True, "true", None, 1),
    ],
)
def test_an_answer_is_right_by_its_value_whatever_the_type_of_the_right_one(
    tmp_path, field, answer, gold, kind, expected
):
    """A right answer that is none does not count."""
    known = pa.array([gold], kind)
    found = found_of(tmp_path, field, [answer], known.view("string") if known.type == "binary" else known)
    assert (found and found["right"]) == expected


@pytest.mark.parametrize("kind", ["binary", pa.time32("s"), pa.duration("s"), pa.list_(pa.string())])
def test_right_answers_of_types_that_cannot_be_compared_are_refused_by_name(kind):
    columns = text_columns({"output": {"schema": SCHEMA}})
    with pytest.raises(ValueError, match=r"input.gold: known is .*, but only"):
        check_gold({"said": "known"}, [pa.field("known", kind)], columns)
