"""The plan of a start: token estimates of its documents, and the memory of a worker."""

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from specextend.cluster.backlog import Estimates, Ints, RowSet
from specextend.cluster.environment import is_local
from specextend.config import RunConfig
from specextend.core import Checkpoint, Values
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts, describe_cut
from specextend.data.source import Source
from specextend.models.causal_lm import ModelFacts
from specextend.models.loading import (
    GIB,
    cache_bytes,
    longest_request,
    memory_bytes,
    rows_per_sequence,
    target_rows,
    usable_bytes,
    with_batch_size,
)
from specextend.requests.splitting import PartPrompts
from specextend.requests.tasks import Task
from specextend.stats import ratio

SAMPLE_SIZE = 200
SAMPLE_BYTES = 64 << 10
"""Tokenizing takes a hundred times the memory of the text."""
BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Upper bounds in prompt tokens."""


class Plan(NamedTuple):
    """The documents of a start and their estimated tokens."""

    estimates: Estimates
    refused: Ints
    """File and row [R, 2] of rows certain to fail."""
    rejected: Counter[str]
    num_over_length: int
    """Rows over the prompt limit."""
    num_cut: int
    unread: float
    """Share of all tokens that are cut."""

    def says_cut(self) -> list[str]:
        """Describe the cuts in a line; empty without cuts."""
        return describe_cut(self.num_cut, len(self.estimates), self.unread)

    def num_prompt_tokens(self) -> int:
        """Sum the estimated prompt tokens."""
        return int(self.estimates.num_prompt_tokens.sum(dtype=np.int64))

    def buckets(self) -> dict[str, int]:
        """Count the documents by prompt length."""
        between = [f"{low + 1} to {high}" for low, high in pairwise(BUCKETS)]
        names = [f"up to {BUCKETS[0]}", *between, f"over {BUCKETS[-1]}"]
        places = np.searchsorted(BUCKETS, self.estimates.num_prompt_tokens)
        counts = np.bincount(places, minlength=len(names)).tolist()
        return {name: count for name, count in zip(names, counts, strict=True) if count}


def make_plan(
    source: Source, tasks: Sequence[Task], keys: RowSet, checkpoint: Checkpoint = lambda: None
) -> Plan:
    """Estimate the documents of `keys` in a single pass over the input.

    The first task supplies the default output limit and the sampling seed.
    """
    prompts = tasks[0].prompts
    decoding = tasks[0].config.decoding
    lengths = array("q")
    refused = array("q")
    rejected = Counter[str]()
    size = min(len(keys), SAMPLE_SIZE)
    sample = set(random.Random(decoding.seed).sample(range(len(keys)), size))
    num_rows = num_tokens = num_bytes = 0
    for row in source.scan():
        checkpoint()
        if row.key not in keys:
            continue
        own = decoding.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
        error_class = row.error_class or _without_room(prompts, own)
        if error_class is not None:
            rejected[error_class] += 1
            refused.extend(row.key)
            continue
        assert row.text is not None, "a null text is an error"
        if num_rows in sample or not num_bytes:
            beginning = row.text[:SAMPLE_BYTES].decode(errors="ignore")  # may cut a character
            num_tokens += len(prompts.encode_document(beginning))
            num_bytes += len(beginning.encode())
        num_rows += 1
        lengths.extend((*row.key, len(row.text), own))
    per_byte = num_tokens / num_bytes if num_bytes else 0.0
    rows = np.asarray(lengths).reshape(-1, 4)
    estimates, num_long, num_cut, unread = _estimate(rows, tasks, per_byte)
    return Plan(estimates, np.asarray(refused).reshape(-1, 2), rejected, num_long, num_cut, unread)


def _estimate(
    lengths: Ints, tasks: Sequence[Task], per_byte: float
) -> tuple[Estimates, int, int, float]:
    """Estimate all tasks together: equal prompt prefixes are read once.

    Args:
        lengths: File, row, bytes and maximum output tokens [N, 4].
    """
    files, rows, num_bytes, limits = lengths.T
    documents = np.round(num_bytes * per_byte).astype(np.int64)
    read = np.zeros_like(documents)
    outputs = np.zeros_like(documents)
    unread = np.zeros_like(documents)
    is_long = np.zeros(len(documents), np.bool_)
    openings = set[object]()
    for task in tasks:
        if not task.config.input.has_limits:
            limits = np.full_like(limits, task.config.decoding.max_new_tokens)
        own, most, is_too_long = _request_tokens(documents, limits, task.prompts)
        is_long |= is_too_long
        if task.config.prompt.length_policy not in ("error", "parts"):
            kept = np.clip(own - task.prompts.num_template_tokens, 0, documents)
            unread = np.maximum(unread, documents - kept)
        outputs += most
        if task.prompts.opening in openings:
            own = np.maximum(own - documents, np.minimum(own, task.prompts.num_template_tokens))
        read += own
        openings.add(task.prompts.opening)
    share = ratio(float(unread.sum()), float(documents.sum())) or 0.0
    estimates = Estimates(files, rows, read, outputs)
    return estimates, int(np.sum(is_long)), int(np.sum(unread > 0)), share


def _request_tokens(documents: Ints, limits: Ints, prompts: Prompts) -> tuple[Ints, Ints, Any]:
    """Return prompt tokens [N], output tokens [N] and a mask of overlong documents [N]."""
    uncut = prompts.num_template_tokens + documents
    most = prompts.limit - limits
    longest = prompts.options.max_prompt_tokens
    if longest is not None:
        most = np.minimum(most, longest)
    is_long = uncut > most
    kept = np.clip(uncut, 0, np.maximum(most, 0))
    outputs = limits.copy()
    if prompts.options.length_policy == "parts":
        work = PartPrompts(prompts).work(documents[is_long], limits[is_long])
        kept[is_long], outputs[is_long] = work
    return kept, outputs, is_long


def _without_room(prompts: Prompts, max_new_tokens: int) -> str | None:
    try:
        prompts.room(max_new_tokens)
    except DocumentError as error:
        return error.error_class
    return None


def plan_memory(config: RunConfig, facts: ModelFacts, plan: Plan) -> Values:
    """Plan a worker's memory.

    Returns:
        `memory_gib` by purpose, and `cache`: the share of the longest document, and how many
        longest or average documents fit.
    """
    sizes = {name: size / GIB for name, size in memory_bytes(config, facts).items()}
    totals = _request_lengths(config, facts, plan)
    if not len(totals):
        return {"memory_gib": sizes, "cache": None}
    num_rows = target_rows(config, facts)
    longest, mean = (
        rows_per_sequence(config, int(number)) for number in (totals.max(), totals.mean())
    )
    cache = {
        "longest_sequence_gib": longest * cache_bytes(config, facts).of_row / GIB,
        "longest_sequences_that_fit": num_rows // longest,
        "mean_sequences_that_fit": num_rows // mean,
        "max_batch_size": config.decoding.batch_size,
    }
    return {"memory_gib": sizes, "cache": cache}


def settle_batch_size(config: RunConfig, facts: ModelFacts, plan: Plan) -> RunConfig:
    """Replace `decoding.max_batch_size: auto` by a number, equal for all workers.

    GPU memory counts only if the workers run on this machine.
    """
    lengths = _request_lengths(config, facts, plan)
    num_tokens = (int(lengths.mean()), int(lengths.max())) if len(lengths) else None
    budget = usable_bytes(config) if is_local() and torch.cuda.is_available() else None
    return with_batch_size(config, facts, budget, num_tokens)


def _request_lengths(config: RunConfig, facts: ModelFacts, plan: Plan) -> Ints:
    totals = plan.estimates.totals()
    if config.prompt.length_policy != "parts" and not config.tasks:
        return totals
    has_own_limits = config.input.has_limits
    longest = (
        config.max_tokens(facts.context_length)
        if has_own_limits
        else longest_request(config, facts)
    )
    return np.minimum(totals, longest)
