"""Tables and drawings of a result that is made up: each figure can be computed in the head."""

import pytest

from benchmarks.tables import to_markdown


def row(variant, doc_id, bucket, decode_s, **more):
    counts = {"num_documents": 1, "num_output_tokens": 11, "num_first_tokens": 1, "loops": False, "equals_base": True}
    seconds = {"decode_s": decode_s, "total_s": decode_s + 1, "wall_s": decode_s + 1}
    where = {"variant": variant, "documents": [doc_id], "bucket": bucket, "repeat": 0}
    return where | counts | seconds | {"mean_acceptance_length": None} | more


@pytest.fixture
def result():
    """Two short documents, two long ones; the draft is 2, 4, 1 and 10 times as fast, the last on a loop."""
    rows = []
    for doc_id, bucket, plain, fast in (("a", "1K", 4, 2), ("b", "1K", 4, 1), ("c", "2K", 4, 4), ("d", "2K", 4, 0.4)):
        rows.append(row("plain", doc_id, bucket, plain, loops=doc_id == "d"))
        rows.append(row("fast", doc_id, bucket, fast, mean_acceptance_length=8 / fast, equals_base=doc_id != "b"))
    return {
        "benchmark": {
            "variants": {"plain": {}, "fast": None},
            "base": "plain",
            "max_new_tokens": 11,
            "sampling": {},
            "together": 1,
        },
        "target": "T-135M",
        "dtype": "bfloat16",
        "device": "A|Processor (cpu family 25, model 17)",
        "threads": 2,
        "time": "2026-11-22T10:00:00+00:00",
        "versions": {"python": "3.11"},
        "commit": "0123456789abcdef",
        "rows": rows,
    }


def cells(result, name):
    head, _, *lines = to_markdown(result, name).splitlines()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    return {first: rest for first, *rest in split}


def test_a_ratio_divides_two_variants_on_the_same_document(result):
    """Medians of ratios, not ratios of medians; documents whose plain output loops are in no figure of all."""
    table = cells(result, "decoding over plain")
    assert table["decoding, over plain"] == ["1K (n=2)", "2K (n=1)", "2K, loops (n=1)", "all (n=3)"]
    assert table["fast"] == ["3.00", "1.00", "10.00", "2.00 (1.00 to 4.00)"]
    assert table["plain"][-1] == "1.00 (1.00 to 1.00)"
    inverse = cells(result, "decoding of plain")
    assert [*inverse] == ["decoding, plain over", "fast"]
    assert inverse["fast"][:2] == ["0.38", "1.00"]
