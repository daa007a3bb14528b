"""The report of a run folder: what was done, how fast, and where the time went."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specextend.data.fingerprint import read_manifest
from specextend.data.storage import Location, list_files, read_bytes, resolve
from specextend.report.buckets import bucket_name, bucket_of
from specextend.report.rows import RunRows
from specextend.report.spread import spread
from specextend.report.tally import COLUMNS, Tally

_PER_DOCUMENT = ("queue_s", "ttft_s", "decode_s", "total_s", "mean_acceptance_length")
_STEP_COUNTS = (
    "num_spec_steps",
    "num_plain_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_fallbacks",
    "num_hybrid_steps",
)
_DONE_COLUMNS = [*dict.fromkeys([*COLUMNS, *_PER_DOCUMENT, "finish_reason", "quality_flags", "worker"])]
_ERROR_COLUMNS = ["doc_id", "error_class", "message", "stage", "retryable"]


def build_report(output: str) -> dict[str, Any]:
    """The report of a run folder, as JSON values. Seconds, tokens and shares (0 to 1); null where there is no value.

    The folder may still be running. Raises ValueError for one that holds no run or a damaged one.
    """
    location = resolve(output)
    rows = RunRows(location)
    done, errors = _Done(), _Errors()
    for table in rows.done(_DONE_COLUMNS):
        done.add(table)
    for table in rows.errors(_ERROR_COLUMNS):
        errors.add(table)
    manifest = read_manifest(location)
    return {
        "output": output,
        "source": rows.source,
        "run": _run(manifest),
        "attempts": _attempts(location),
        "rows": _row_counts(manifest, done.tally.num_documents, errors.num_rows),
        **done.report(),
        "errors": errors.report(),
    }


@dataclass(slots=True)
class _Done:
    """The documents done, table by table."""

    tally: Tally = field(default_factory=Tally)
    buckets: defaultdict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Per document, for the spreads."""
    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, rows: pa.Table) -> None:
        self.tally.add(rows)
        buckets = np.array([bucket_of(tokens) for tokens in rows["num_prompt_tokens"].to_pylist()])
        for bucket in np.unique(buckets).tolist():
            self.buckets[bucket].add(rows.filter(pa.array(buckets == bucket)))
        for name in _PER_DOCUMENT:
            self.values[name] += rows[name].drop_null().to_pylist()
        self.values["decode_tokens_per_s"] += _decode_speeds(rows)
        for name in ("finish_reason", "worker"):
            self.counts[name].update(rows[name].to_pylist())
        self.counts["quality_flags"].update(pc.list_flatten(rows["quality_flags"]).to_pylist())

    def report(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "tokens": {name: tally.sums[f"num_{name}_tokens"] for name in ("prompt", "output", "dropped")},
            "acceptance": _acceptance(tally),
            "speed": _speed(tally),
            "time": {"busy_s": tally.busy_s, "shares": tally.time_shares},
            "retrieval": _retrieval(tally),
            "retries": {"documents": tally.num_tried_again, "memory": tally.sums["num_memory_retries"]},
            "per_document": {name: _spread(values) for name, values in self.values.items()},
            "buckets": [_bucket(bucket, self.buckets[bucket]) for bucket in sorted(self.buckets)],
            "finish_reasons": _falling(self.counts["finish_reason"]),
            "quality_flags": _falling(self.counts["quality_flags"]),
            "workers": _falling(self.counts["worker"]),
        }


@dataclass(slots=True)
class _Errors:
    """The documents given up, by class and stage, with one example each."""

    counts: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, bool], tuple[str, str]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.counts.total()

    def add(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            kind = (row["error_class"], row["stage"], row["retryable"])
            self.counts[kind] += 1
            self.examples.setdefault(kind, (row["doc_id"], row["message"]))

    def report(self) -> list[dict[str, Any]]:
        names = ("error_class", "stage", "retryable", "rows", "example_doc_id", "example_message")
        return [
            dict(zip(names, (*kind, rows, *self.examples[kind]), strict=True))
            for kind, rows in self.counts.most_common()
        ]


def _run(manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of the configuration, what a reader of the figures must know."""
    if manifest is None:
        return None
    config = manifest["config"]
    sections = ("target", "draft", "decoding", "attention", "tree", "cache")
    return {"fingerprint": manifest["fingerprint"], **{name: config.get(name) for name in sections}}


def _attempts(output: Location) -> list[dict[str, Any]]:
    """Every start of the run, oldest first."""
    folder = output.child("_run", "attempts")
    records = [json.loads(read_bytes(folder.child(name)) or b"{}") for name in list_files(folder)]
    names = ("run_id", "begin", "end", "exit_code", "versions")
    known = [{name: record.get(name) for name in names} for record in records]
    return sorted(known, key=lambda record: str(record["begin"]))


def _row_counts(manifest: dict[str, Any] | None, done: int, errors: int) -> dict[str, int | None]:
    files = None if manifest is None else manifest["identity"]["files"].values()
    rows = None if files is None else sum(file["rows"] for file in files)
    return {"input": rows, "done": done, "errors": errors, "pending": None if rows is None else rows - done - errors}


def _acceptance(tally: Tally) -> dict[str, Any]:
    return {
        "mean_acceptance_length": tally.mean_acceptance_length,
        "draft_acceptance_rate": tally.draft_acceptance_rate,
        "histogram": tally.acceptance_histogram,
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
        "retrieval_coverage": tally.retrieval_coverage,
    }


def _spread(values: list[float]) -> dict[str, Any] | None:
    measured = spread(values)
    return None if measured is None else asdict(measured)


def _falling(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common())


def _decode_speeds(rows: pa.Table) -> list[float]:
    """Of each document with two tokens or more."""
    tokens, seconds = rows["num_output_tokens"].to_pylist(), rows["decode_s"].to_pylist()
    return [(n - 1) / s for n, s in zip(tokens, seconds, strict=True) if s]
