"""The output's columns are a promise."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from specextend.core import Completion, DocumentKey
from specextend.data.prompts import Prompt
from specextend.data.quality import Quality
from specextend.data.schema import (
    ERROR_SCHEMA,
    PART_SCHEMA,
    SUMMARY_SCHEMA,
    result_row,
    summary_schema,
)
from specextend.stats import DecodingStats

COLUMNS = """doc_id, summary, finish_reason, num_prompt_tokens, num_output_tokens, num_dropped_tokens, length_policy,
chunk_summaries, num_spec_steps, num_plain_steps, num_draft_tokens, num_accepted_tokens, mean_acceptance_length,
draft_acceptance_rate, acceptance_histogram, num_retrievals, retrieval_coverage, retrieval_churn, queue_s, ttft_s,
decode_s, total_s, prefill_s, draft_prefill_s, draft_s, verify_s, retrieval_s, other_s, output_tokens_per_s,
quality_flags, worker, attempts, num_fallbacks, num_hybrid_steps,
num_memory_retries, started_at, copied_fraction, rouge1, rouge2, rougeL, num_forwards, content_sha256, coverage,
num_requests, num_cached_tokens"""

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
NOTHING_TO_SAY = Quality([], None)


def row(stats: DecodingStats, quality: Quality = NOTHING_TO_SAY) -> dict[str, Any]:
    completion = Completion("1:2", [4, 5], "text", "stop", stats)
    key, prompt, times = (
        DocumentKey(1, 2),
        Prompt([1], 7, "tail"),
        {"content_sha256": "00", "queue_s": 0.5, "started_at": 1.25},
    )
    built = result_row(key, "doc", completion, prompt, quality, **times, worker="host/0", attempts=2)
    return dict(pa.Table.from_pylist([built], schema=PART_SCHEMA).to_pylist()[0])


def test_the_columns_are_those_promised_in_their_order() -> None:
    assert SUMMARY_SCHEMA.names == COLUMNS.replace("\n", " ").split(", ")
    assert ERROR_SCHEMA.names == ["key", "doc_id", "error_class", "message", "stage", "retryable", "attempts"]
    assert summary_schema([pa.field("topic", pa.string())]).names[-2:] == ["num_cached_tokens", "topic"]


def test_a_row_holds_counts_and_ratios_that_can_be_checked_by_hand() -> None:
    built = row(STATS)
    assert built["mean_acceptance_length"] == 1 + 6 / 3
    assert built["draft_acceptance_rate"] == 6 / 24
    assert built["acceptance_histogram"] == [0, 1, 1, 1]
    assert (built["retrieval_coverage"], built["retrieval_churn"]) == (0.75, 0.25)
    assert (built["total_s"], built["output_tokens_per_s"]) == (3.0, 3.0)
    assert (built["file"], built["row"], built["doc_id"], built["worker"], built["attempts"]) == (
        1,
        2,
        "doc",
        "host/0",
        2,
    )
    assert (built["num_dropped_tokens"], built["length_policy"], built["queue_s"]) == (7, "tail", 0.5)
    assert built["started_at"] == datetime(1970, 1, 1, 0, 0, 1, 250_000, UTC)
    assert built["error_class"] is None


def test_what_there_is_nothing_to_say_about_is_null() -> None:
    """Plain decoding has no acceptance: 0 would pull an average down."""
    built = row(DecodingStats(num_output_tokens=1))
    empty = {name for name in SUMMARY_SCHEMA.names if built[name] is None}
    assert empty == {
        "chunk_summaries",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "retrieval_coverage",
        "retrieval_churn",
        "output_tokens_per_s",
        "copied_fraction",
        "rouge1",
        "rouge2",
        "rougeL",
    }


def test_what_is_known_of_a_summarys_quality_has_columns_of_its_own() -> None:
    """A filter on them needs no parsing of a list."""
    built = row(STATS, Quality(["copied"], 0.95, 0.5, 0.25, 0.4))
    assert built["quality_flags"] == ["copied"]
    assert built["copied_fraction"] == 0.95
    assert (built["rouge1"], built["rouge2"], built["rougeL"]) == (0.5, 0.25, 0.4)
