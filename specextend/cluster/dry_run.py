"""What a run would do: rows, tokens, memory. Loads no weights, writes nothing."""

from __future__ import annotations

from statistics import median
from typing import Any

from specextend.cluster.exits import RefusedError
from specextend.cluster.plan import Plan, make_plan
from specextend.cluster.progress import TokenEstimate
from specextend.cluster.run import Prepared, check_same_run, read_progress
from specextend.core import DocumentKey
from specextend.data.documents import InputError
from specextend.data.parts import pending
from specextend.loading import GIB, rows_per_sequence


def dry_run(prepared: Prepared, *, retry_errors: bool = False) -> dict[str, Any]:
    """The plan of a start as JSON values. Raises OtherRunError where the folder holds another run, RefusedError."""
    config, source = prepared.config, prepared.source
    progress = read_progress(prepared.output) if check_same_run(prepared) else None
    rows = [file.num_rows for file in source.files]
    keys = set(pending(rows, progress, retry_errors=retry_errors)) if progress else _all_keys(rows)
    decoding = config.decoding
    try:
        plan = make_plan(source, prepared.prompts, keys, decoding.max_new_tokens, decoding.seed, lambda: None)
    except InputError as error:
        raise RefusedError(str(error)) from error
    return {
        "rows": source.num_rows,
        "rows_to_do": len(keys),
        "rows_rejected": dict(plan.rejected),
        "rows_over_length": plan.num_over_length,
        "length_policy": config.prompt.length_policy,
        "prompt_tokens": plan.num_prompt_tokens(),
        "output_tokens_at_most": sum(estimate.max_new_tokens for estimate in plan.estimates.values()),
        "tokens_per_byte": plan.tokens_per_byte,
        "prompt_lengths": plan.buckets(),
        "cache": _cache(prepared, plan),
        "time": "not measured",
        "fingerprint": prepared.manifest["fingerprint"],
    }


def describe_dry_run(plan: dict[str, Any]) -> str:
    """The plan for people."""
    lines = [
        f"{plan['rows_to_do']} of {plan['rows']} rows to do, {sum(plan['rows_rejected'].values())} of them rejected",
        *(f"  {count} x {name}" for name, count in plan["rows_rejected"].items()),
        f"about {plan['rows_over_length']} rows over the prompt limit, which length policy {plan['length_policy']} "
        + ("makes error rows" if plan["length_policy"] == "error" else "cuts"),
        f"about {plan['prompt_tokens']:,} prompt tokens, {plan['output_tokens_at_most']:,} output tokens at most",
        "prompt tokens: " + ", ".join(f"{name}: {count}" for name, count in plan["prompt_lengths"].items()),
    ]
    if cache := plan["cache"]:
        lines.append(
            f"cache: {cache['median_sequence_gib']:.3f} GiB for the median sequence, "
            f"{cache['longest_sequence_gib']:.3f} GiB for the longest; {cache['longest_sequences_that_fit']} of the "
            f"longest fit in decoding.cache_gib ({cache['cache_gib']:g}), {cache['max_batch_size']} may run together"
        )
    return "\n".join([*lines, f"time: {plan['time']}"])


def _all_keys(rows: list[int]) -> set[DocumentKey]:
    return {DocumentKey(file, row) for file, num_rows in enumerate(rows) for row in range(num_rows)}


def _cache(prepared: Prepared, plan: Plan) -> dict[str, Any] | None:
    """Cache memory per sequence, and how many fit; None without a document."""
    config = prepared.config
    sizes = [_gib(prepared, estimate) for estimate in plan.estimates.values() if estimate.num_prompt_tokens]
    if not sizes:
        return None
    return {
        "bytes_per_token": prepared.facts.kv_bytes_per_token(config.target.dtype),
        "median_sequence_gib": median(sizes),
        "longest_sequence_gib": max(sizes),
        "longest_sequences_that_fit": int(config.decoding.cache_gib / max(sizes)),
        "cache_gib": config.decoding.cache_gib,
        "max_batch_size": config.decoding.max_batch_size,
    }


def _gib(prepared: Prepared, estimate: TokenEstimate) -> float:
    """GiB of the target's cache that a document takes."""
    config = prepared.config
    rows = rows_per_sequence(config, estimate.total)
    return rows * prepared.facts.kv_bytes_per_token(config.target.dtype) / GIB
