"""The output's columns are a promise."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from specextend.core import Completion, DocumentKey
from specextend.data.prompts import Prompt
from specextend.data.quality import Quality
from specextend.data.schema import (
    PART_SCHEMA,
    SUMMARY_SCHEMA,
    result_row,
)
from specextend.stats import DecodingStats

STATS = DecodingStats(
    num_prompt_tokens=100,
    num_output_tokens=9,
    num_spec_steps=3,
    num_draft_tokens=24,
    num_accepted_tokens=6,
    acceptance_histogram=[0, 1, 1, 1],
    num_retrievals=2,
    retrieval_coverage_sum=1.5,
    retrieval_churn_sum=0.25,
    ttft_s=1.0,
    decode_s=2.0,
)


def row(stats: DecodingStats) -> dict[str, Any]:
    completion, prompt = Completion("1:2", [4, 5], "text", "stop", stats), Prompt([1], 7, "tail")
    facts = {"content_sha256": "00", "queue_s": 0.5, "started_at": 1.25, "worker": "host/0", "attempts": 2}
    built = result_row(DocumentKey(1, 2), "doc", completion, prompt, Quality([], None), **facts)
    return dict(pa.Table.from_pylist([built], schema=PART_SCHEMA).to_pylist()[0])


def test_a_row_holds_counts_and_ratios_that_can_be_checked_by_hand() -> None:
    built = row(STATS)
    assert built["mean_acceptance_length"] == 1 + 6 / 3
    assert built["draft_acceptance_rate"] == 6 / 24
    assert built["acceptance_histogram"] == [0, 1, 1, 1]
    assert (built["retrieval_coverage"], built["retrieval_churn"]) == (0.75, 0.25)
    assert (built["total_s"], built["output_tokens_per_s"]) == (3.0, 3.0)
    of_the_document = [built[name] for name in ("file", "row", "doc_id", "worker", "attempts")]
    assert of_the_document == [1, 2, "doc", "host/0", 2]
    assert (built["num_dropped_tokens"], built["length_policy"], built["queue_s"]) == (7, "tail", 0.5)
    assert built["started_at"] == datetime(1970, 1, 1, 0, 0, 1, 250_000, UTC)
    assert built["error_class"] is None


def test_what_there_is_nothing_to_say_about_is_null() -> None:
    """Plain decoding has no acceptance: 0 would pull an average down."""
    built = row(DecodingStats(num_output_tokens=1))
    empty = [name for name in SUMMARY_SCHEMA.names if built[name] is None]
    names = "chunk_summaries mean_acceptance_length draft_acceptance_rate acceptance_histogram retrieval_coverage "
    names += "retrieval_churn output_tokens_per_s copied_fraction rouge1 rouge2 rougeL"
    assert sorted(empty) == sorted(names.split())
