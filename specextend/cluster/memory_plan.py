"""The memory of a worker, planned before anything is loaded: weights, caches, how many documents fit, and the batch."""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specextend.cluster.environment import is_local
from specextend.cluster.planning import Plan
from specextend.config import RunConfig
from specextend.loading import (
    GIB,
    longest_request,
    memory_bytes,
    rows_per_sequence,
    usable_bytes,
    with_batch_size,
)
from specextend.models import ModelFacts


def plan_memory(config: RunConfig, facts: ModelFacts, plan: Plan) -> dict[str, Any]:
    """Plan in GiB, as JSON values: `memory_gib` of `memory_bytes`, and `cache`, None if there is no document."""
    return {
        "memory_gib": {name: size / GIB for name, size in memory_bytes(config, facts, _device(config)).items()},
        "cache": _cache(config, facts, plan),
    }


def settle_batch_size(config: RunConfig, facts: ModelFacts, plan: Plan) -> RunConfig:
    """Return the configuration with a number in the place of `decoding.max_batch_size: auto`.

    It is the same for all workers. Only if they run on this machine is the memory of their GPUs known, else
    `decoding.cache_gib` alone counts.
    """
    device = _device(config)
    lengths = _lengths(config, facts, plan)
    longest = int(lengths.max()) if len(lengths) else longest_request(config, facts)
    budget = usable_bytes(config, device) if is_local() and torch.cuda.is_available() else None
    return with_batch_size(config, facts, longest, device, budget)


def _device(config: RunConfig) -> torch.device:
    """Return the kind of device that a worker computes on, which this machine need not have."""
    return torch.device("cuda" if config.job.gpus_per_worker else "cpu")


def _lengths(config: RunConfig, facts: ModelFacts, plan: Plan) -> NDArray[np.int64]:
    """Return the tokens of each document that will be decoded, prompt and output; in parts, those of one request."""
    totals = plan.estimates.totals[plan.estimates.num_prompt_tokens > 0]
    if config.prompt.length_policy != "chunk":
        return totals
    has_own_limits = config.input.max_new_tokens_column is not None
    return np.minimum(
        totals, config.max_tokens(facts.context_length) if has_own_limits else longest_request(config, facts)
    )


def _cache(config: RunConfig, facts: ModelFacts, plan: Plan) -> dict[str, Any] | None:
    """Compute the memory of a document in the target's cache, and how many fit."""
    decoding, bytes_per_token = config.decoding, facts.kv_bytes_per_token(config.target.dtype)
    totals = np.sort(_lengths(config, facts, plan))
    if not len(totals):
        return None
    middle = totals[[(len(totals) - 1) // 2, len(totals) // 2]].tolist()
    median_gib, longest_gib = (
        mean(rows_per_sequence(config, total) for total in of) * bytes_per_token / GIB
        for of in (middle, [int(totals[-1])])
    )
    return {
        "bytes_per_token": bytes_per_token,
        "median_sequence_gib": median_gib,
        "median_sequences_that_fit": int(decoding.cache_gib / median_gib),
        "longest_sequence_gib": longest_gib,
        "longest_sequences_that_fit": int(decoding.cache_gib / longest_gib),
        "cache_gib": decoding.cache_gib,
        "max_batch_size": decoding.batch_size,
    }
