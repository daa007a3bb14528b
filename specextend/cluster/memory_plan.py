"""The memory of a worker, planned before anything is loaded: weights, caches, and how many documents fit."""

from __future__ import annotations

from statistics import median
from typing import Any

from specextend.cluster.planning import Plan
from specextend.config import RunConfig
from specextend.loading import GIB, memory_bytes, rows_per_sequence
from specextend.models import ModelFacts


def plan_memory(config: RunConfig, facts: ModelFacts, plan: Plan) -> dict[str, Any]:
    """Plan in GiB, as JSON values: `memory_gib` of `memory_bytes`, and `cache`, None if there is no document.

    The memory of a forward pass comes on top.
    """
    return {
        "memory_gib": {name: size / GIB for name, size in memory_bytes(config, facts).items()},
        "cache": _cache(config, facts, plan),
    }


def _cache(config: RunConfig, facts: ModelFacts, plan: Plan) -> dict[str, Any] | None:
    """Compute the memory of a document in the target's cache, and how many fit."""
    decoding, bytes_per_token = config.decoding, facts.kv_bytes_per_token(config.target.dtype)
    sizes = [
        rows_per_sequence(config, estimate.total) * bytes_per_token / GIB
        for estimate in plan.estimates.values()
        if estimate.num_prompt_tokens
    ]
    if not sizes:
        return None
    return {
        "bytes_per_token": bytes_per_token,
        "median_sequence_gib": median(sizes),
        "median_sequences_that_fit": int(decoding.cache_gib / median(sizes)),
        "longest_sequence_gib": max(sizes),
        "longest_sequences_that_fit": int(decoding.cache_gib / max(sizes)),
        "cache_gib": decoding.cache_gib,
        "max_batch_size": decoding.max_batch_size,
    }
