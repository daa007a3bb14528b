"""Figures as `jobs/bench.py` writes them, from measurements that were made up."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

from specextend.bench.compare import Machine, Record, figures
from specextend.bench.measurement import Measurement
from specextend.bench.workload import BenchDocument
from specextend.decoding.limits import MachineLimits, ModelWork
from specextend.report.statistics import spread
from specextend.stats import DecodingStats

MACHINE = {
    "environment": {"device": "A made-up processor", "threads": 2, "versions": {"torch": "2.13.0"}},
    "config": {"target": {"model": ".models/a-target", "dtype": "bfloat16"}},
    "max_new_tokens": 64,
}
ROOF = Machine(
    MachineLimits(read_bytes_per_s=1e9, flop_per_s=1e12),
    ModelWork(
        weight_bytes=10_000_000,
        kv_bytes_per_token=1000,
        layer_parameters=4_000_000,
        head_parameters=1_000_000,
        attention_flop_per_pair=100,
    ),
)
SIDES = ("autoregressive", "tree", "specextend", "ngram", "merged", "transformers", "transformers-lookup")


def compare_result() -> dict[str, Any]:
    """Of `compare`: two documents of each of two lengths; side i is about i + 1 times as fast as side 0."""
    records = [
        Record(
            BenchDocument(f"report-{length}", bucket, [1] * length),
            {name: measured(1 / (1 + number + more) if number else 1.0) for number, name in enumerate(SIDES)},
        )
        for bucket, length, more in ((1024, 900, 0.0), (1024, 1000, 0.5), (2048, 1900, -0.5), (2048, 2000, 0.0))
    ]
    described = {name: {"mode": "specextend", "draft": name} for name in SIDES}
    return {"kind": "compare", **MACHINE, "configured_draft": "draft", "sides": described, **figures(records, ROOF)}


def looping_result() -> dict[str, Any]:
    """Of `compare`: of three documents, one of 1K and all of 2K end in a loop."""
    records = [
        Record(BenchDocument(f"report-{length}", bucket, [1] * length), {"autoregressive": each, "merged": each})
        for bucket, length, token_ids in ((1024, 900, [*range(33)]), (1024, 1000, [7] * 33), (2048, 2000, [7] * 33))
        for each in [Measurement(token_ids, 1.0, 2.0, 32)]
    ]
    sides = {"autoregressive": {"mode": "autoregressive", "draft": None}, "merged": {"mode": "specextend"}}
    return {"kind": "compare", **MACHINE, "configured_draft": "draft", "sides": sides, **figures(records, ROOF)}


def measured(decode_s: float) -> Measurement:
    """Of 33 tokens in 16 steps."""
    stats = DecodingStats(
        num_spec_steps=12, num_plain_steps=4, num_accepted_tokens=16, decode_s=decode_s, verify_s=decode_s
    )
    return Measurement([*range(33)], decode_s, decode_s + 1.0, 16, stats=stats)


def retrieval_result() -> dict[str, Any]:
    """Of `retrieval`: two drafts, two caches, two kinds of documents, two lengths."""
    cells = [
        cell(draft, policy, kind, length)
        for draft, policy, kind, length in product(
            ("eagle", "small-lm"), ("streaming", "retrieval"), ("govreport", "needles"), (1024, 7000)
        )
    ]
    studies = [{**cells[0], "study": "heads=max"}]
    layers = [
        {"kind": "needles", "heads": heads, "layer": layer, "shown": asdict(found)}
        for heads in ("mean", "max")
        for layer in range(12)
        if (found := spread([0.05 * (layer % 11), 0.05 * (layer % 11) + 0.1])) is not None
    ]
    measured = {"cells": cells, "studies": studies, "layers": layers}
    return {"kind": "retrieval", **MACHINE, "lengths": [1024, 7000], **measured}


def cell(draft: str, policy: str, kind: str, length: int) -> dict[str, Any]:
    """Acceptance of three documents; needles have a category of their own."""
    found = spread([2.0, 2.5, 3.0] if policy == "retrieval" else [1.0, 1.5, 2.0])
    assert found is not None
    measured = asdict(found)
    category = {"tokens": 15, **dict.fromkeys(("accepted", "acceptance_length", "agreement", "visible"), measured)}
    return {
        "draft": draft,
        "policy": policy,
        "cache_tokens": 512,
        "kind": kind,
        "length": length,
        "documents": 3,
        "acceptance_length": measured,
        **dict.fromkeys(("agreement", "divergence", "kl", "coverage"), measured),
        "categories": {"needle": category, "rest": category} if kind == "needles" else {},
    }
