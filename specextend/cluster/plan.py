"""The plan of a start: its documents with their tokens, estimated from a sample, and the memory that a worker takes."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specextend.cluster.backlog import Estimates
from specextend.cluster.environment import is_local
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.inputs import DocumentError
from specextend.data.parts import PartPrompts
from specextend.data.prompts import Prompts
from specextend.data.source import ScannedRow, Source
from specextend.loading import (
    GIB,
    longest_request,
    memory_bytes,
    rows_per_sequence,
    usable_bytes,
    with_batch_size,
)
from specextend.models import ModelFacts

SAMPLE_SIZE = 200
"""Rows whose texts are tokenized to estimate tokens per byte."""
SAMPLE_BYTES = 64 << 10
"""Most bytes of each that are tokenized: that takes a hundred times the memory of the text."""
MOST_TOKENS = 1 << 40
"""More than any document has: a column may claim what overflows our sums."""
REFUSED = -1
"""Stands for the output tokens of a row that is sure to become an error row."""
BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Upper bounds of the length buckets, in prompt tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The documents of a start with their estimated tokens."""

    estimates: Estimates
    tokens_per_byte: float | None
    """None if `num_tokens_column` gives the tokens of every document."""
    rejected: Counter[str]
    """Number of rows that are sure to become error rows, by error class."""
    num_over_length: int
    """Number of rows whose estimate exceeds the prompt limit, so that the length policy applies to them."""

    def num_prompt_tokens(self) -> int:
        """Sum the estimated prompt tokens of all documents."""
        return int(self.estimates.num_prompt_tokens.sum(dtype=np.int64))

    def buckets(self) -> dict[str, int]:
        """Count the documents by estimated prompt length."""
        places = np.searchsorted(BUCKETS, self.estimates.num_prompt_tokens)
        counts = np.bincount(places, minlength=len(BUCKETS) + 1).tolist()
        return {_bucket_name(place): count for place, count in enumerate(counts) if count}


def make_plan(
    source: Source,
    prompts: Prompts,
    keys: Collection[DocumentKey],
    max_new_tokens: int,
    seed: int,
    checkpoint: Callable[[], None],
) -> Plan:
    """Estimate the documents of `keys` in one streaming pass over the input.

    max_new_tokens: for rows without a value of their own. seed: of the sample. checkpoint: called for every row; may
    raise.
    """
    lengths, rejected = _Lengths(), Counter[str]()
    sample = set(random.Random(seed).sample(range(len(keys)), min(len(keys), SAMPLE_SIZE)))
    num_tokens = num_bytes = 0
    for row in source.scan():
        checkpoint()
        if row.key not in keys:
            continue
        own = max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
        error_class = row.error_class or _without_room(prompts, own)
        if error_class is not None:
            rejected[error_class] += 1
        elif row.text is not None and (len(lengths.rows) in sample or not num_bytes):
            beginning = row.text[:SAMPLE_BYTES].decode(errors="ignore")  # cut between characters
            num_tokens += len(prompts.encode_document(beginning))
            num_bytes += len(beginning.encode())
        lengths.add(row, own if error_class is None else REFUSED)
    per_byte = num_tokens / num_bytes if num_bytes else None
    estimates, num_over_length = lengths.estimates(prompts, per_byte)
    return Plan(estimates, per_byte, rejected, num_over_length)


@dataclass(slots=True)
class _Lengths:
    """Keeps what the scan of the input gives of each row, in columns: ten million rows must fit."""

    files: array[int] = field(default_factory=lambda: array("i"))
    rows: array[int] = field(default_factory=lambda: array("q"))
    num_bytes: array[int] = field(default_factory=lambda: array("q"))
    num_tokens: array[int] = field(default_factory=lambda: array("q"))
    """-1 where it is not known."""
    max_new_tokens: array[int] = field(default_factory=lambda: array("q"))
    """`REFUSED` for a row that will be refused."""

    def add(self, row: ScannedRow, max_new_tokens: int) -> None:
        """Add a row."""
        self.files.append(row.key.file)
        self.rows.append(row.key.row)
        self.num_bytes.append(row.num_bytes or 0)
        self.num_tokens.append(-1 if row.num_tokens is None else min(row.num_tokens, MOST_TOKENS))
        self.max_new_tokens.append(max_new_tokens)

    def estimates(self, prompts: Prompts, per_byte: float | None) -> tuple[Estimates, int]:
        """Estimate template and document, cut or in parts as the policy says; nothing for a row that will be refused.

        Returns the estimates, and how many rows have to be cut.
        """
        columns = (self.num_tokens, self.num_bytes, self.max_new_tokens)
        counts, num_bytes, limits = (np.array(column, np.int64) for column in columns)
        measured = np.round(num_bytes * (per_byte or 0.0)).astype(np.int64)
        uncut = prompts.num_template_tokens + np.where(counts < 0, measured, counts)
        is_kept = limits != REFUSED
        most = _most_prompt_tokens(prompts, limits)
        is_long = is_kept & (uncut > most)
        kept = np.where(is_kept, np.clip(uncut, 0, np.maximum(most, 0)), 0)
        outputs = np.maximum(limits, 0)
        if prompts.options.length_policy == "parts":
            lengths = uncut[is_long] - prompts.num_template_tokens
            kept[is_long], outputs[is_long], _ = PartPrompts(prompts).work(lengths, limits[is_long])
        files, rows = np.array(self.files, np.int64), np.array(self.rows, np.int64)
        return Estimates(files, rows, kept, outputs), int(np.sum(is_long))


def _without_room(prompts: Prompts, max_new_tokens: int) -> str | None:
    """Return the error class of a `max_new_tokens` that leaves no room for a document; None if there is room."""
    try:
        prompts.room(max_new_tokens)
    except DocumentError as error:
        return error.error_class
    return None


def _most_prompt_tokens(prompts: Prompts, max_new_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the most tokens that prompts may have. [N]."""
    limits = prompts.limit - max_new_tokens
    longest = prompts.options.max_prompt_tokens
    return limits if longest is None else np.minimum(limits, longest)


def _bucket_name(index: int) -> str:
    if index == 0:
        return f"up to {BUCKETS[0]}"
    if index == len(BUCKETS):
        return f"over {BUCKETS[-1]}"
    return f"{BUCKETS[index - 1] + 1} to {BUCKETS[index]}"


def plan_memory(config: RunConfig, facts: ModelFacts, plan: Plan) -> dict[str, Any]:
    """Plan a worker's memory in GiB, as JSON values: `memory_gib` of `memory_bytes`, and `cache`.

    `cache` is the memory of the median and of the longest document in the target's cache, and how many of each fit;
    None if there is no document.
    """
    sizes = {name: size / GIB for name, size in memory_bytes(config, facts, _device(config)).items()}
    totals, decoding = np.sort(_request_lengths(config, facts, plan)), config.decoding
    if not len(totals):
        return {"memory_gib": sizes, "cache": None}
    per_token = facts.kv_bytes_per_token(config.target.dtype)
    middle = totals[[(len(totals) - 1) // 2, len(totals) // 2]].tolist()
    median_gib, longest_gib = (
        mean(rows_per_sequence(config, total) for total in of) * per_token / GIB for of in (middle, [int(totals[-1])])
    )
    cache = {
        "bytes_per_token": per_token,
        "median_sequence_gib": median_gib,
        "median_sequences_that_fit": int(decoding.cache_gib / median_gib),
        "longest_sequence_gib": longest_gib,
        "longest_sequences_that_fit": int(decoding.cache_gib / longest_gib),
        "cache_gib": decoding.cache_gib,
        "max_batch_size": decoding.batch_size,
    }
    return {"memory_gib": sizes, "cache": cache}


def settle_batch_size(config: RunConfig, facts: ModelFacts, plan: Plan) -> RunConfig:
    """Return the configuration with a number in the place of `decoding.max_batch_size: auto`.

    It is the same for all workers. Only if they run on this machine is the memory of their GPUs known, else
    `decoding.cache_gib` alone counts.
    """
    device, lengths = _device(config), _request_lengths(config, facts, plan)
    longest = int(lengths.max()) if len(lengths) else longest_request(config, facts)
    budget = usable_bytes(config, device) if is_local() and torch.cuda.is_available() else None
    return with_batch_size(config, facts, longest, device, budget)


def _device(config: RunConfig) -> torch.device:
    """Return the kind of device that a worker computes on, which this machine need not have."""
    return torch.device("cuda" if config.job.gpus_per_worker else "cpu")


def _request_lengths(config: RunConfig, facts: ModelFacts, plan: Plan) -> NDArray[np.int64]:
    """Return the tokens of each document that will be decoded, prompt and output; in parts, those of one request."""
    totals = plan.estimates.totals[plan.estimates.num_prompt_tokens > 0]
    if config.prompt.length_policy != "parts":
        return totals
    has_own_limits = config.input.has_limits
    longest = config.max_tokens(facts.context_length) if has_own_limits else longest_request(config, facts)
    return np.minimum(totals, longest)
