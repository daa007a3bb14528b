"""Figures of the documents of a run: sums and their ratios in all and by prompt length, spreads, counts, errors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specextend.data.schema import PART_SCHEMA
from specextend.report.rows import BATCH_ROWS, RUN_ID, told_apart
from specextend.stats import PHASES, ratio

SMALLEST = 512
"""Upper bound in tokens of the smallest bucket of prompt lengths."""
NUM_SLOWEST = 10
_STEP_COUNTS = (
    "num_spec_steps",
    "num_plain_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_fallbacks",
    "num_hybrid_steps",
)
_TOKENS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_dropped_tokens")
_SUMS = (*_TOKENS, *_STEP_COUNTS, "num_retrievals", "num_memory_retries", "decode_s", "total_s", *PHASES)
_WEIGHTED = ("coverage_sum", "churn_sum", "num_churns", "tried_again")
_OF_TEXT = ("copied_fraction", "rouge1", "rouge2", "rougeL")
_OF_WORK = ("queue_s", "ttft_s", "decode_s", "total_s", "mean_acceptance_length")
_SLOWEST = ("doc_id", "worker", "attempts", "num_prompt_tokens", "num_output_tokens", "finish_reason", "queue_s")
DONE_COLUMNS = tuple(
    dict.fromkeys(
        (
            *(*_SLOWEST, *_SUMS, *_OF_WORK, *_OF_TEXT, "acceptance_histogram", "retrieval_coverage", "retrieval_churn"),
            *("started_at", "num_forwards", "num_requests", "quality_flags", "copied_from"),
        )
    )
)
"""Columns of a finished document that the report needs: no text, but a few hundred bytes."""
ERROR_COLUMNS = ("doc_id", "error_class", "message", "stage", "retryable")
"""Columns of a failed document that the report needs."""
_DONE_SCHEMA = pa.schema([*(PART_SCHEMA.field(name) for name in DONE_COLUMNS), (RUN_ID, pa.string())])


class RunFigures:
    """What the figures of a run need of its rows, collected as they are read."""

    def __init__(self) -> None:
        self._done: list[pa.Table] = []
        self._waiting = [_DONE_SCHEMA.empty_table()]
        self._errors: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def add(self, results: pa.Table) -> None:
        """Add results as `read_results` yields them, with all columns and ORIGIN."""
        self.take(*told_apart(results, DONE_COLUMNS, ERROR_COLUMNS))

    def take(self, is_done: bool, rows: pa.Table) -> None:
        """Add rows of DONE_COLUMNS and RUN_ID, or error rows of ERROR_COLUMNS."""
        if is_done:
            self._waiting.append(rows)
            if sum(map(len, self._waiting)) >= BATCH_ROWS:
                self._join()
            return
        for row in rows.to_pylist():
            kind = {"error_class": row["error_class"], "stage": row["stage"] or "", "retryable": row["retryable"]}
            example = {"example_doc_id": row["doc_id"] or "", "example_message": row["message"] or ""}
            self._errors.setdefault(tuple(kind.values()), {**kind, "rows": 0, **example})["rows"] += 1

    @property
    def done(self) -> pa.Table:
        """Return DONE_COLUMNS and RUN_ID of the finished documents; NaN and infinity are null."""
        self._join()
        return pa.concat_tables(self._done)

    @property
    def num_errors(self) -> int:
        """Count the failed documents."""
        return sum(error["rows"] for error in self._errors.values())

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Return the failed documents by class and stage, each with one example, the most frequent first."""
        return sorted(self._errors.values(), key=lambda error: -error["rows"])

    def _join(self) -> None:
        """Make one piece of the tables that wait: a commit has few rows, and every piece costs the same."""
        if self._waiting:
            self._done.append(_without_nan(pa.concat_tables(self._waiting).combine_chunks()))
        self._waiting = []


def decoded(documents: pa.Table) -> pa.Table:
    """Select the documents on which work was done: not those that are copies of another one."""
    is_decoded = documents["copied_from"].is_null()
    return documents.filter(is_decoded) if documents["copied_from"].null_count < len(documents) else documents


def document_figures(documents: pa.Table) -> dict[str, Any]:
    """Compute the sections of the report that follow from the finished documents (DONE_COLUMNS) alone.

    A copy of another document counts where summaries are counted and measured, not where work is.
    """
    work = _with_weights(decoded(documents))
    sums = _sums(work)
    busy_s = _busy_s(sums)
    histogram = _histogram(work["acceptance_histogram"])
    spreads = {name: work[name] for name in _OF_WORK} | {"decode_tokens_per_s": _decode_speeds(work)}
    spreads |= {name: documents[name] for name in _OF_TEXT}
    return {
        "tokens": {name.removeprefix("num_").removesuffix("_tokens"): sums[name] for name in _TOKENS},
        "acceptance": {
            "mean_acceptance_length": _acceptance_length(sums),
            "draft_acceptance_rate": ratio(sums["num_accepted_tokens"], sums["num_draft_tokens"]),
            "histogram": histogram,
            "at_least": [sum(histogram[depth:]) / sum(histogram) for depth in range(len(histogram)) if sum(histogram)],
            "mean_tree_size": ratio(sums["num_draft_tokens"], sums["num_spec_steps"]),
            **{name: sums[name] for name in _STEP_COUNTS},
        },
        "speed": _speed(sums),
        "time": {"busy_s": busy_s, "shares": _shares(sums)},
        "retrieval": {
            "num_retrievals": sums["num_retrievals"],
            "coverage": ratio(sums["coverage_sum"], sums["num_retrievals"]),
            "churn": ratio(sums["churn_sum"], sums["num_churns"]),
        },
        "retries": {"documents": sums["tried_again"], "memory": sums["num_memory_retries"]},
        "per_document": {name: _spread(column) for name, column in spreads.items()},
        "buckets": _buckets(work),
        "finish_reasons": _counts(documents["finish_reason"]),
        "quality_flags": _counts(pc.list_flatten(documents["quality_flags"])),
        "workers": _counts(work["worker"]),
        "slowest": _slowest(work),
    }


def _with_weights(work: pa.Table) -> pa.Table:
    """Add the columns of _WEIGHTED, whose sums are divided by others.

    A document with one retrieval has no churn: null, and left out of both sums.
    """
    retrievals, churn = work["num_retrievals"], work["retrieval_churn"]
    changes = pc.subtract(retrievals, 1)
    added = {
        "coverage_sum": pc.multiply(work["retrieval_coverage"], retrievals),
        "churn_sum": pc.multiply(churn, changes),
        "num_churns": pc.if_else(churn.is_valid(), changes, None),
        "tried_again": pc.cast(pc.greater(work["attempts"], 1), pa.int64()),
    }
    for name, column in added.items():
        work = work.append_column(name, column)
    return work


def _sums(work: pa.Table) -> dict[str, Any]:
    """Add up the columns over the documents; those without values are 0."""
    sums = {name: pc.sum(work[name]).as_py() or 0 for name in (*_SUMS, *_WEIGHTED)}
    return {"documents": len(work), **sums}


def _buckets(work: pa.Table) -> list[dict[str, Any]]:
    """Describe the documents of each prompt length, up to a power of two; the bound belongs to its bucket."""
    tokens = work["num_prompt_tokens"].fill_null(0).to_numpy()
    bounds = np.maximum(SMALLEST, 1 << np.frexp(tokens - 1)[1])
    narrow = work.select([*_SUMS, *_WEIGHTED])
    of_bound = ((bound, _sums(narrow.filter(pa.array(bounds == bound)))) for bound in np.unique(bounds).tolist())
    return [_bucket(bound, sums) for bound, sums in of_bound]


def _bucket(bound: int, sums: Mapping[str, Any]) -> dict[str, Any]:
    documents = sums["documents"]
    return {
        "bucket": f"{bound // 1024}K" if bound >= 1024 else str(bound),
        "max_prompt_tokens": bound,
        "documents": documents,
        "mean_acceptance_length": _acceptance_length(sums),
        **_speed(sums),
        "time_shares": _shares(sums),
        "seconds_per_document": {name.removesuffix("_s"): ratio(sums[name], documents) for name in PHASES},
        "retrieval_coverage": ratio(sums["coverage_sum"], sums["num_retrievals"]),
    }


def _acceptance_length(sums: Mapping[str, Any]) -> float | None:
    """Return the tokens per speculative step, including the one that the target adds."""
    extra = ratio(sums["num_accepted_tokens"], sums["num_spec_steps"])
    return None if extra is None else 1 + extra


def _speed(sums: Mapping[str, Any]) -> dict[str, float | None]:
    """Return tokens per second: of a sequence after its first token, of it with prefill, of a worker with its batch."""
    tokens = sums["num_output_tokens"]
    return {
        "decode_tokens_per_s": ratio(tokens - sums["documents"], sums["decode_s"]),
        "end_to_end_tokens_per_s": ratio(tokens, sums["total_s"]),
        "tokens_per_busy_s": ratio(tokens, _busy_s(sums)),
    }


def _busy_s(sums: Mapping[str, Any]) -> float:
    return sum(sums[name] for name in PHASES)


def _shares(sums: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the share of the workers' time that each phase took."""
    return {name.removesuffix("_s"): ratio(sums[name], _busy_s(sums)) for name in PHASES}


def _histogram(column: pa.ChunkedArray) -> list[int]:
    """Add lists up entry by entry, the missing entries of shorter ones as 0."""
    lists = pa.chunked_array([column.drop_null().combine_chunks()])
    lengths = pc.list_value_length(lists).to_numpy()
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return [int(count) for count in np.bincount(places, weights=pc.list_flatten(lists).to_numpy())]


def _decode_speeds(work: pa.Table) -> pa.ChunkedArray:
    """Compute the decode speed of each document with two or more tokens."""
    seconds = pc.if_else(pc.greater(work["decode_s"], 0), work["decode_s"], None)
    return pc.divide(pc.cast(pc.subtract(work["num_output_tokens"], 1), pa.float64()), seconds)


def _spread(column: pa.ChunkedArray) -> dict[str, Any] | None:
    """Return n, median, mean, range and sample standard deviation of the values that are not null."""
    values = column.drop_null().to_pylist()
    if not values:
        return None
    return {
        "n": len(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
    }


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Count the rows of each value, the most frequent first."""
    counts = pc.value_counts(column.drop_null()).to_pylist()
    return {each["values"]: each["counts"] for each in sorted(counts, key=lambda each: -each["counts"])}


def _slowest(work: pa.Table) -> list[dict[str, Any]]:
    chosen = pc.select_k_unstable(work, NUM_SLOWEST, [("total_s", "descending"), ("doc_id", "ascending")])
    rows = work.select(list(dict.fromkeys((*_SLOWEST, "total_s", *PHASES, "started_at")))).take(chosen).to_pylist()
    for row in rows:
        row["started_at"] = row["started_at"] and row["started_at"].isoformat(timespec="milliseconds")
    return [row for row in rows if row["total_s"] is not None]


def _without_nan(rows: pa.Table) -> pa.Table:
    """Replace NaN and infinity by null, so that one such row does not spoil every sum."""
    for index, column in enumerate(rows.columns):
        if pa.types.is_floating(column.type):
            rows = rows.set_column(index, rows.field(index), pc.if_else(pc.is_finite(column), column, None))
    return rows
