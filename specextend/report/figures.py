"""Figures of the documents of a run, collected table by table."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from specextend.data.schema import PART_SCHEMA
from specextend.report.limit_shares import LIMITED
from specextend.report.rows import BATCH_ROWS, RUN_ID, told_apart
from specextend.report.statistics import COLUMNS, Tally, bucket_name, bucket_of, spread, spread_json
from specextend.stats import PHASES, ratio

_TEXT = ("copied_fraction", "rouge1", "rouge2", "rougeL")
_OF_WORK = ("queue_s", "ttft_s", "decode_s", "total_s", "mean_acceptance_length")
_STEP_COUNTS = (
    "num_spec_steps",
    "num_plain_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_fallbacks",
    "num_hybrid_steps",
)
TIMED = tuple(dict.fromkeys(("started_at", "total_s", "num_output_tokens", *PHASES, *LIMITED)))
"""Columns that the wall clock and the limits need of each document, beside RUN_ID."""
_SLOWEST = ("doc_id", "worker", "attempts", "num_prompt_tokens", "num_output_tokens", "finish_reason", "queue_s")
DONE_COLUMNS = [
    *dict.fromkeys([*COLUMNS, *_OF_WORK, *_TEXT, *TIMED, *_SLOWEST, "quality_flags"]),
]
"""Columns of a finished document that the report needs."""
ERROR_COLUMNS = ["doc_id", "error_class", "message", "stage", "retryable"]
"""Columns of a failed document that the report needs."""
NUM_SLOWEST = 10


@dataclass(slots=True)
class DoneFigures:
    """Figures of the finished documents, collected table by table."""

    num_rows: int = 0
    tally: Tally = field(default_factory=Tally)
    buckets: defaultdict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    values: defaultdict[str, list[NDArray[np.float64]]] = field(default_factory=lambda: defaultdict(list))
    """One number per document, for the spreads."""
    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _timed: list[pa.Table] = field(default_factory=list)
    _slowest: pa.Table | None = None

    def add(self, rows: pa.Table) -> None:
        """Add rows of DONE_COLUMNS and RUN_ID."""
        rows = _without_nan(rows)
        self._add_work(rows)
        self._add_texts(rows)

    def _add_texts(self, rows: pa.Table) -> None:
        self.num_rows += len(rows)
        for name in _TEXT:
            self.values[name].append(rows[name].drop_null().to_numpy())
        self.counts["finish_reason"].update(rows["finish_reason"].drop_null().to_pylist())
        self.counts["quality_flags"].update(pc.list_flatten(rows["quality_flags"]).to_pylist())

    def _add_work(self, rows: pa.Table) -> None:
        self.tally.add(rows)
        buckets = np.array([bucket_of(tokens) for tokens in rows["num_prompt_tokens"].fill_null(0).to_pylist()])
        for bucket in np.unique(buckets).tolist():
            self.buckets[bucket].add(rows.filter(pa.array(buckets == bucket)))
        for name in _OF_WORK:
            self.values[name].append(rows[name].drop_null().to_numpy())
        self.values["decode_tokens_per_s"].append(_decode_speeds(rows))
        self.counts["worker"].update(rows["worker"].drop_null().to_pylist())
        self._timed.append(rows.select([*TIMED, RUN_ID]))
        self._keep_slowest(rows.filter(rows["total_s"].is_valid()))

    def _keep_slowest(self, rows: pa.Table) -> None:
        rows = rows if self._slowest is None else pa.concat_tables([self._slowest, rows])
        keys = [("total_s", "descending"), ("doc_id", "ascending")]
        self._slowest = rows.take(pc.select_k_unstable(rows, NUM_SLOWEST, keys))

    @property
    def timed(self) -> pa.Table:
        """Return TIMED and RUN_ID of all documents."""
        schema = pa.schema([*(PART_SCHEMA.field(name) for name in TIMED), (RUN_ID, pa.string())])
        return pa.concat_tables(self._timed) if self._timed else schema.empty_table()

    def report(self) -> dict[str, Any]:
        """Return the sections of the report that follow from the finished documents alone."""
        tally = self.tally
        return {
            "tokens": {name: tally.sums[f"num_{name}_tokens"] for name in ("prompt", "cached", "output", "dropped")},
            "acceptance": _acceptance(tally),
            "speed": _speed(tally),
            "time": {"busy_s": tally.busy_s, "shares": tally.time_shares},
            "retrieval": _retrieval(tally),
            "retries": {"documents": tally.num_tried_again, "memory": tally.sums["num_memory_retries"]},
            "per_document": {
                name: spread_json(spread(np.concatenate(values).tolist())) for name, values in self.values.items()
            },
            "buckets": [_bucket(bucket, self.buckets[bucket]) for bucket in sorted(self.buckets)],
            "finish_reasons": _falling(self.counts["finish_reason"]),
            "quality_flags": _falling(self.counts["quality_flags"]),
            "workers": _falling(self.counts["worker"]),
            "slowest": [] if self._slowest is None else [_slow(row) for row in self._slowest.to_pylist()],
        }


@dataclass(slots=True)
class ErrorFigures:
    """Counts of the failed documents by class and stage, with one example each."""

    counts: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, bool], tuple[str, str]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Count the failed documents."""
        return self.counts.total()

    def add(self, rows: pa.Table) -> None:
        """Add rows of ERROR_COLUMNS."""
        for row in rows.to_pylist():
            kind = (row["error_class"], row["stage"] or "", row["retryable"])
            self.counts[kind] += 1
            self.examples.setdefault(kind, (row["doc_id"] or "", row["message"] or ""))

    def report(self) -> list[dict[str, Any]]:
        """Return one entry for each class and stage, the most frequent first."""
        names = ("error_class", "stage", "retryable", "rows", "example_doc_id", "example_message")
        return [
            dict(zip(names, (*kind, rows, *self.examples[kind]), strict=True))
            for kind, rows in self.counts.most_common()
        ]


class RunFigures:
    """Figures of all documents of a run, collected as its results are read."""

    def __init__(self) -> None:
        self._done, self.errors = DoneFigures(), ErrorFigures()
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0

    def add(self, results: pa.Table) -> None:
        """Add results as `read_results` yields them, with all columns and ORIGIN."""
        self.take(*told_apart(results, DONE_COLUMNS, ERROR_COLUMNS))

    def take(self, is_done: bool, rows: pa.Table) -> None:
        """Add rows of DONE_COLUMNS and RUN_ID, or error rows of ERROR_COLUMNS."""
        if not is_done:
            self.errors.add(rows)
            return
        self._waiting.append(rows)
        self._num_waiting += len(rows)
        if self._num_waiting >= BATCH_ROWS:
            self._join()

    @property
    def done(self) -> DoneFigures:
        """Return the figures of the finished documents that were added so far."""
        self._join()
        return self._done

    def _join(self) -> None:
        """Count the rows that wait: a commit has few, and every table costs the same."""
        if self._waiting:
            self._done.add(pa.concat_tables(self._waiting).combine_chunks())
        self._waiting, self._num_waiting = [], 0


def _acceptance(tally: Tally) -> dict[str, Any]:
    return {
        "mean_acceptance_length": tally.mean_acceptance_length,
        "draft_acceptance_rate": tally.draft_acceptance_rate,
        "histogram": tally.acceptance_histogram,
        "at_least": tally.accepted_at_least,
        "mean_tree_size": tally.mean_tree_size,
        **{name: tally.sums[name] for name in _STEP_COUNTS},
    }


def _speed(tally: Tally) -> dict[str, float | None]:
    return {
        "decode_tokens_per_s": tally.decode_tokens_per_s,
        "end_to_end_tokens_per_s": tally.end_to_end_tokens_per_s,
        "tokens_per_busy_s": tally.tokens_per_busy_s,
    }


def _retrieval(tally: Tally) -> dict[str, float | None]:
    return {
        "num_retrievals": tally.sums["num_retrievals"],
        "coverage": tally.retrieval_coverage,
        "churn": tally.retrieval_churn,
    }


def _bucket(bucket: int, tally: Tally) -> dict[str, Any]:
    return {
        "bucket": bucket_name(bucket),
        "max_prompt_tokens": bucket,
        "documents": tally.num_documents,
        "mean_acceptance_length": tally.mean_acceptance_length,
        **_speed(tally),
        "time_shares": tally.time_shares,
        "seconds_per_document": {
            name.removesuffix("_s"): ratio(tally.sums[name], tally.num_documents) for name in PHASES
        },
        "retrieval_coverage": tally.retrieval_coverage,
    }


def _slow(row: dict[str, Any]) -> dict[str, Any]:
    """Describe one of the slowest documents."""
    times = {name: row[name] for name in ("total_s", *PHASES)}
    started = None if row["started_at"] is None else row["started_at"].isoformat(timespec="milliseconds")
    return {name: row[name] for name in _SLOWEST} | times | {"started_at": started}


def _falling(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common())


def _decode_speeds(rows: pa.Table) -> NDArray[np.float64]:
    """Compute the decode speed of each document with two or more tokens."""
    rows = rows.filter(pc.greater(rows["decode_s"], 0))
    speeds = pc.divide(pc.cast(pc.subtract(rows["num_output_tokens"], 1), pa.float64()), rows["decode_s"])
    return speeds.drop_null().to_numpy()


def _without_nan(rows: pa.Table) -> pa.Table:
    """Replace NaN and infinity by null, so that one such row does not spoil every sum."""
    for index, column in enumerate(rows.columns):
        if pa.types.is_floating(column.type):
            rows = rows.set_column(index, rows.field(index), pc.if_else(pc.is_finite(column), column, None))
    return rows
