"""From measurements to figures: speeds, ratios per document, agreement, and what a step is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from specextend.bench.measurement import Measurement
from specextend.bench.rounds import Record
from specextend.report.buckets import bucket_name
from specextend.report.spread import Spread, spread
from specextend.report.tally import PHASES
from specextend.stats import DecodingStats, ratio

SPEEDS = ("decode_tokens_per_s", "end_to_end_tokens_per_s")
BASES = ("autoregressive", "transformers", "transformers-lookup")
"""Every other side is reported over each of these."""
ALSO = (("specextend", "tree"),)
"""And the first over the second."""


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """Of all documents together and of each length bucket; and whether greedy tokens agree."""
    buckets = sorted({record.document.bucket for record in records})
    groups = {bucket_name(bucket): [r for r in records if r.document.bucket == bucket] for bucket in buckets}
    by_bucket = {name: _group(group) for name, group in groups.items()}
    return {
        "all": _group(records),
        "buckets": by_bucket,
        "lowest_bucket": {
            pair: lowest_bucket(by_bucket, pair) for pair in by_bucket[bucket_name(buckets[0])]["ratios"]
        },
        "agreement": {f"{a}/{b}": agreement(records, a, b) for a, b in _compared(records)},
        "documents": [_document(record) for record in records],
    }


def speed_ratios(records: Iterable[Record], a: str, b: str, speed: str) -> Spread | None:
    """Spread over documents of side a's speed over side b's on the same document."""
    return spread(
        ratio(x, y) if x is not None and y is not None else None
        for record in records
        for x, y in [(getattr(record.measurements[a], speed), getattr(record.measurements[b], speed))]
    )


def lowest_bucket(by_bucket: Mapping[str, Any], pair: str) -> dict[str, Any]:
    """For each speed the bucket whose median ratio is the lowest, with that median; None where no bucket has one."""
    lowest: dict[str, Any] = {}
    for speed in SPEEDS:
        ratios = {name: group["ratios"][pair][speed] for name, group in by_bucket.items()}
        medians = {name: measured["median"] for name, measured in ratios.items() if measured is not None}
        name = min(medians, key=medians.__getitem__, default=None)
        lowest[speed] = None if name is None else {"bucket": name, "median": medians[name]}
    return lowest


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ; None where they are equal."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def agreement(records: Sequence[Record], a: str, b: str) -> dict[str, Any]:
    """How many documents got the same tokens, and where the others first differ.

    In fp32 any difference is an error of ours; in bf16 kernels round differently, and a near tie may fall either way.
    """
    found = [
        (record.document.doc_id, first_difference(record.measurements[a].token_ids, record.measurements[b].token_ids))
        for record in records
    ]
    differences = {doc_id: index for doc_id, index in found if index is not None}
    return {"documents": len(found), "equal": len(found) - len(differences), "first_differences": differences}


def total_stats(records: Iterable[Record], name: str) -> DecodingStats | None:
    """Counts and seconds of one side summed; None for a side that has none."""
    total = DecodingStats()
    for record in records:
        stats = record.measurements[name].stats
        if stats is None:
            return None
        total.add(stats)
    return total


def step_ms(stats: DecodingStats) -> dict[str, float | None]:
    """Milliseconds of a decoding step by phase; drafting holds the pass over the prompt's last token."""
    steps = stats.num_spec_steps + stats.num_plain_steps
    phases = ("draft_s", "verify_s", "retrieval_s")
    each = {name.removesuffix("_s"): ratio(1e3 * getattr(stats, name), steps) for name in phases}
    return {**each, "whole": ratio(1e3 * stats.decode_s, steps)}


def _group(records: Sequence[Record]) -> dict[str, Any]:
    return {
        "documents": len(records),
        "sides": {name: _side(records, name) for name in records[0].measurements},
        "ratios": {
            f"{a}/{b}": {speed: _json(speed_ratios(records, a, b, speed)) for speed in SPEEDS}
            for a, b in _pairs(records)
        },
    }


def _side(records: Sequence[Record], name: str) -> dict[str, Any]:
    measured = [record.measurements[name] for record in records]
    side: dict[str, Any] = {
        "output_tokens": sum(len(each.token_ids) for each in measured),
        **{speed: _json(spread(getattr(each, speed) for each in measured)) for speed in SPEEDS},
        "total_s": _json(spread(each.total_s for each in measured)),
        "tokens_per_step": ratio(
            sum(each.num_decoded_tokens for each in measured), sum(each.num_steps for each in measured)
        ),
    }
    stats = total_stats(records, name)
    if stats is not None:
        busy = sum(getattr(stats, phase) for phase in PHASES)
        side |= {
            "num_spec_steps": stats.num_spec_steps,
            "num_plain_steps": stats.num_plain_steps,
            "num_fallbacks": stats.num_fallbacks,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "acceptance_histogram": stats.acceptance_histogram,
            "retrieval_coverage": stats.retrieval_coverage,
            "step_ms": step_ms(stats),
            "time_shares": {phase.removesuffix("_s"): ratio(getattr(stats, phase), busy) for phase in PHASES},
        }
    return side


def _document(record: Record) -> dict[str, Any]:
    document = record.document
    return {
        "doc_id": document.doc_id,
        "bucket": bucket_name(document.bucket),
        "num_prompt_tokens": len(document.prompt_token_ids),
        "sides": {name: _measured(measured) for name, measured in record.measurements.items()},
    }


def _measured(measured: Measurement) -> dict[str, Any]:
    stats = measured.stats
    return {
        "num_output_tokens": len(measured.token_ids),
        "num_first_tokens": measured.num_first_tokens,
        "num_steps": measured.num_steps,
        "decode_s": measured.decode_s,
        "total_s": measured.total_s,
        **{speed: getattr(measured, speed) for speed in SPEEDS},
        "mean_acceptance_length": None if stats is None else stats.mean_acceptance_length,
    }


def _pairs(records: Sequence[Record]) -> list[tuple[str, str]]:
    names = records[0].measurements.keys()
    over_bases = [(a, b) for b in BASES if b in names for a in names if a != b]
    return over_bases + [(a, b) for a, b in ALSO if a in names and b in names]


def _compared(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Whose tokens are compared: every side's with those of the first base there is."""
    pairs = _pairs(records)
    return [pair for pair in pairs if pair[1] == pairs[0][1] or pair in ALSO]


def _json(measured: Spread | None) -> dict[str, Any] | None:
    return None if measured is None else asdict(measured)
