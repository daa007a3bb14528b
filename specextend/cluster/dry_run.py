"""What a run would do: rows, tokens, memory. Loads no weights, writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from specextend.cluster.exits import RefusedError, StoreError
from specextend.cluster.planning import Plan, make_plan
from specextend.cluster.prepare import Prepared
from specextend.cluster.progress import TokenEstimate
from specextend.cluster.run import check_same_run, read_progress, say_left_out
from specextend.core import DocumentKey
from specextend.data.audit import describe_skipped
from specextend.data.inputs import InputError, InputUnreachableError
from specextend.data.parts import Retry, pending
from specextend.loading import GIB, rows_per_sequence


def dry_run(prepared: Prepared, *, retry_errors: Retry = "none") -> dict[str, Any]:
    """The plan of a start as JSON values. Raises OtherRunError where the folder holds another run, RefusedError."""
    config, source = prepared.config, prepared.source
    progress = read_progress(prepared) if check_same_run(prepared) else None
    rows = [file.num_rows for file in source.files]
    keys = set(pending(rows, progress, retry_errors=retry_errors)) if progress else _all_keys(rows)
    decoding = config.decoding
    try:
        plan = make_plan(source, prepared.prompts, keys, decoding.max_new_tokens, decoding.seed, lambda: None)
    except InputUnreachableError as error:
        raise StoreError(str(error)) from error
    except InputError as error:
        raise RefusedError(str(error)) from error
    return {
        "rows": source.num_rows,
        "rows_to_do": len(keys),
        "error_rows_left_out": len(progress.final) if progress and retry_errors == "retryable" else 0,
        "rows_rejected": dict(plan.rejected),
        "rows_over_length": plan.num_over_length,
        "audit": _audit(prepared, plan),
        "length_policy": config.prompt.length_policy,
        "prompt_tokens": plan.num_prompt_tokens(),
        "output_tokens_at_most": sum(estimate.max_new_tokens for estimate in plan.estimates.values()),
        "tokens_per_byte": plan.tokens_per_byte,
        "prompt_lengths": plan.buckets(),
        "cache": _cache(prepared, plan),
        "time": "not measured",
        "models": prepared.models,
        "fingerprint": prepared.manifest["fingerprint"],
    }


def describe_dry_run(plan: dict[str, Any]) -> str:
    """The plan for people."""
    audit = [(each["check"], _say_rows(each["rows"]), each["outcome"]) for each in plan["audit"]]
    lengths = [(name, f"{count:,}") for name, count in plan["prompt_lengths"].items()]
    lines = [
        f"{plan['rows_to_do']} of {plan['rows']} rows to do, {sum(plan['rows_rejected'].values())} of them rejected",
        *([say_left_out(plan["error_rows_left_out"])] if plan["error_rows_left_out"] else []),
        *_table(("input", "rows", "they are"), audit),
        f"about {plan['prompt_tokens']:,} prompt tokens, {plan['output_tokens_at_most']:,} output tokens at most",
        *_table(("prompt tokens", "rows"), lengths),
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


def _audit(prepared: Prepared, plan: Plan) -> list[dict[str, Any]]:
    """What was looked for in the rows to do: `check`, `rows` (None: not looked at) and the `outcome` for such rows."""
    policy, counts = prepared.config.prompt.length_policy, plan.rejected
    is_read = prepared.source.options.num_tokens_column is None
    text = {"null text": "NullText", "empty text": "EmptyText", "text not UTF-8": "UndecodableText"}
    found = [(check, counts[name] if is_read else None, "error rows") for check, name in text.items()]
    found += [
        ("max_new_tokens below 1", counts["BadMaxNewTokens"], "error rows"),
        ("no room for a document", counts["PromptTooLong"], "error rows"),
        ("over the prompt limit", plan.num_over_length, "error rows" if policy == "error" else f"cut ({policy})"),
    ]
    refused = ("columns of a wrong type", "null ids", "repeated ids")  # `prepare` has found none
    found += [(check, 0, "refused") for check in refused]
    if skipped := prepared.source.skipped:
        found.append(("files of another kind", None, f"skipped: {describe_skipped(skipped)}"))
    return [{"check": check, "rows": rows, "outcome": outcome} for check, rows, outcome in found]


def _say_rows(count: int | None) -> str:
    return "not read" if count is None else f"{count:,}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of columns, the second to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    form = "  " + "  ".join(f"{{:{'>' if i == 1 else '<'}{width}}}" for i, width in enumerate(widths))
    return [form.format(*row).rstrip() for row in (head, *rows)]


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
