"""The audit's figures: what counts as rounding, what as a wrong text, and a speed-up that divides by hand."""

import pyarrow as pa
import pytest

from specextend.data.audit_rows import AUDIT_SCHEMA
from specextend.report.figures import audit_figures

ROW = {
    "file": 0,
    "num_tokens": 11,
    "num_equal_tokens": 11,
    "batch_size": 4,
    "is_full_batch": True,
    "prefill_s": 2.0,
    "speculative_s": 5.0,
    "num_plain_tokens": 11,
    "plain_prefill_s": 2.0,
    "plain_s": 10.0,
}


def table(*changes):
    rows = [ROW | {"row": number, "doc_id": f"d{number}"} | change for number, change in enumerate(changes)]
    return pa.Table.from_pylist(rows, schema=AUDIT_SCHEMA)


@pytest.mark.parametrize(("dtype", "ties"), [("float32", 0), ("bfloat16", 1)])
def test_a_small_gap_is_rounding_where_numbers_are_short(dtype, ties):
    """In bfloat16 two correct decodings choose differently where two logits nearly tie, in float32 hardly ever."""
    figures = audit_figures(table({}, {"num_equal_tokens": 5, "gap": 0.25}, {"num_equal_tokens": 0, "gap": 7.0}), dtype)
    assert (figures["equal"], figures["near_ties"], figures["different"]) == (1, ties, 2 - ties)
    assert figures["token_agreement"] == pytest.approx(16 / 33)
    assert figures["largest_gap"] == 7.0


def test_the_speed_up_is_seconds_per_token_over_seconds_per_token():
    """The first token comes out of prefill; documents of one token, and those in a smaller batch, are left out."""
    left_out = {"num_tokens": 1}, {"batch_size": 1, "is_full_batch": False, "plain_s": 40.0, "plain_prefill_s": 0.0}
    figures = audit_figures(table({}, {"num_tokens": 6, "speculative_s": 5.0}, *left_out), "float32")
    speedup = figures["speedup"]
    assert (speedup["documents"], speedup["batch_size"]) == (2, 4)
    assert speedup["decode"] == pytest.approx((20 / 20) / (10 / 15))
    assert speedup["end_to_end"] == pytest.approx((24 / 22) / (14 / 17))
    assert figures["seconds"] == pytest.approx(76.0)


def test_a_document_that_was_audited_twice_counts_once():
    """Two starts of a run, when the first one's result was lost on the way."""
    twice = pa.concat_tables([table({"num_equal_tokens": 3, "gap": 9.0}), table({})])
    assert audit_figures(twice, "float32")["different"] == 0
