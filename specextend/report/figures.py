"""Figures of the documents of a run, and beside the limits of its devices."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specextend.core import ReadOnly, Values
from specextend.data.run_folder import Start
from specextend.data.schema import COMMIT_SCHEMA
from specextend.decoding.measurements import MachineLimits, ModelWork
from specextend.report.result_rows import BATCH_ROWS, RUN_ID, told_apart, without_nan
from specextend.stats import PHASES, ratio

SMALLEST = 512
"""Upper bound in tokens of the smallest bucket of prompt lengths."""
NUM_SLOWEST = 10
NUM_IDS = 10
"""Ids that are listed of the documents of a class of errors or of a quality flag."""
_LIMITED = (
    "worker",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_spec_steps",
    "num_plain_steps",
    "num_forwards",
    "num_requests",
    "prefill_s",
    "verify_s",
)
_KINDS: tuple[Any, ...] = (MachineLimits, ModelWork)
_LIMITS = {spec.name for kind in _KINDS for spec in fields(kind)}
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
            *("started_at", "num_forwards", "num_requests", "quality_flags", "evidence", "choices"),
        )
    )
)
"""Columns of a finished document that the report needs; what it keeps of them is no text, but a few hundred bytes."""
ERROR_COLUMNS = ("doc_id", "error_class", "message", "stage", "retryable")
"""Columns of a failed document that the report needs."""
_KEPT = [name for name in DONE_COLUMNS if name not in ("evidence", "choices")]
_DONE_SCHEMA = pa.schema([*(COMMIT_SCHEMA.field(name) for name in _KEPT), (RUN_ID, pa.string())])


class RunFigures:
    """The columns of a run that its figures need, collected as they are read."""

    def __init__(self) -> None:
        self._done: list[pa.Table] = []
        self._waiting = [_DONE_SCHEMA.empty_table()]
        self._errors: dict[tuple[str, str, bool], Values] = {}
        self.evidence: dict[str, dict[str, int]] = {}
        """By field of an answer: documents with a string there, the strings, and those that the documents hold."""
        self.choices: dict[str, dict[str, dict[str, float]]] = {}
        """By field that was scored and its likeliest value: documents, and the sum of its probabilities."""

    def add(self, results: pa.Table) -> None:
        """Add results as `read_results` yields them, with all columns."""
        self.take(*told_apart(results, DONE_COLUMNS, ERROR_COLUMNS))

    def take(self, is_done: bool, rows: pa.Table) -> None:
        """Add rows of DONE_COLUMNS and RUN_ID, or error rows of ERROR_COLUMNS."""
        if is_done:
            self._count_evidence(rows["evidence"])
            self._count_choices(rows["choices"])
            self._waiting.append(rows.select([*_KEPT, RUN_ID]))
            if sum(map(len, self._waiting)) >= BATCH_ROWS:
                self._join()
            return
        for row in rows.to_pylist():
            kind = {"error_class": row["error_class"], "stage": row["stage"] or "", "retryable": row["retryable"]}
            example = {"example_doc_id": row["doc_id"] or "", "example_message": row["message"] or ""}
            known = self._errors.setdefault(tuple(kind.values()), {**kind, "rows": 0, **example, "doc_ids": []})
            known["rows"] += 1
            known["doc_ids"] += [example["example_doc_id"]][: NUM_IDS - len(known["doc_ids"])]

    def _count_evidence(self, column: pa.ChunkedArray) -> None:
        for strings in column.drop_null().to_pylist():
            for each in strings:
                counts = self.evidence.setdefault(each["field"], {"documents": 0, "strings": 0, "found": 0})
                counts["strings"] += 1
                counts["found"] += each["begin"] is not None
            for field in {each["field"] for each in strings}:
                self.evidence[field]["documents"] += 1

    def _count_choices(self, column: pa.ChunkedArray) -> None:
        for scored in column.drop_null().to_pylist():
            likeliest: dict[str, Values] = {}
            for each in scored:
                if each["log_prob"] > likeliest.get(each["field"], {"log_prob": -math.inf})["log_prob"]:
                    likeliest[each["field"]] = each
            for field, each in likeliest.items():
                values = self.choices.setdefault(field, {})
                counts = values.setdefault(each["value"], {"documents": 0, "probability_sum": 0.0})
                counts["documents"] += 1
                counts["probability_sum"] += math.exp(each["log_prob"])

    @property
    def done(self) -> pa.Table:
        """Return the columns that are kept and RUN_ID of the finished documents; NaN and infinity are null."""
        self._join()
        return pa.concat_tables(self._done)

    @property
    def num_errors(self) -> int:
        """Count the failed documents."""
        return sum(error["rows"] for error in self._errors.values())

    @property
    def errors(self) -> list[Values]:
        """Return the failed documents by class and stage, each with one example, the most frequent first."""
        return sorted(self._errors.values(), key=lambda error: -error["rows"])

    def _join(self) -> None:
        """Make one piece of the tables that wait: a commit has few rows, and every piece costs the same."""
        if self._waiting:
            self._done.append(without_nan(pa.concat_tables(self._waiting).combine_chunks()))
        self._waiting = []


def document_figures(documents: pa.Table) -> Values:
    """Compute the sections of the report that follow from the finished documents (`RunFigures.done`) alone."""
    work = _with_weights(documents)
    sums = _sums(work)
    busy_s = _busy_s(sums)
    histogram = _histogram(work["acceptance_histogram"])
    return {
        "tokens": {name.removeprefix("num_").removesuffix("_tokens"): sums[name] for name in _TOKENS},
        "acceptance": {
            "mean_acceptance_length": _acceptance_length(sums),
            "draft_acceptance_rate": ratio(sums["num_accepted_tokens"], sums["num_draft_tokens"]),
            "speculative_share": ratio(sums["num_spec_steps"], sums["num_spec_steps"] + sums["num_plain_steps"]),
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
        "per_document": {name: _spread(documents[name]) for name in (*_OF_WORK, *_OF_TEXT)},
        "buckets": _buckets(work),
        "finish_reasons": _counts(documents["finish_reason"]),
        "quality_flags": _counts(pc.list_flatten(documents["quality_flags"])),
        "flagged": _flagged(documents.select(["doc_id", "quality_flags"])),
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


def _sums(work: pa.Table) -> Values:
    """Add up the columns over the documents; those without values are 0."""
    sums = {name: pc.sum(work[name]).as_py() or 0 for name in (*_SUMS, *_WEIGHTED)}
    return {"documents": len(work), **sums}


def _buckets(work: pa.Table) -> list[Values]:
    """Describe the documents of each prompt length, up to a power of two; the bound belongs to its bucket."""
    tokens = work["num_prompt_tokens"].fill_null(0).to_numpy()
    bounds = np.maximum(SMALLEST, 1 << np.frexp(tokens - 1)[1])
    narrow = work.select([*_SUMS, *_WEIGHTED])
    of_bound = ((bound, _sums(narrow.filter(pa.array(bounds == bound)))) for bound in np.unique(bounds).tolist())
    return [_bucket(bound, sums) for bound, sums in of_bound]


def _bucket(bound: int, sums: ReadOnly) -> Values:
    documents = sums["documents"]
    return {
        "bucket": f"{bound // 1024}K" if bound >= 1024 else str(bound),
        "max_prompt_tokens": bound,
        "documents": documents,
        "mean_acceptance_length": _acceptance_length(sums),
        **_speed(sums),
        "retrieval_coverage": ratio(sums["coverage_sum"], sums["num_retrievals"]),
        "time_shares": _shares(sums),
        "seconds_per_document": {name.removesuffix("_s"): ratio(sums[name], documents) for name in PHASES},
    }


def _acceptance_length(sums: ReadOnly) -> float | None:
    """Return the tokens per speculative step, including the one that the target adds."""
    extra = ratio(sums["num_accepted_tokens"], sums["num_spec_steps"])
    return None if extra is None else 1 + extra


def _speed(sums: ReadOnly) -> dict[str, float | None]:
    """Return tokens per second: of a sequence after its first token, of it with prefill, of a worker with its batch."""
    tokens = sums["num_output_tokens"]
    return {
        "decode_tokens_per_s": ratio(tokens - sums["documents"], sums["decode_s"]),
        "end_to_end_tokens_per_s": ratio(tokens, sums["total_s"]),
        "tokens_per_busy_s": ratio(tokens, _busy_s(sums)),
    }


def _busy_s(sums: ReadOnly) -> float:
    return sum(sums[name] for name in PHASES)


def _shares(sums: ReadOnly) -> dict[str, float | None]:
    """Return the share of the workers' time that each phase took."""
    return {name.removesuffix("_s"): ratio(sums[name], _busy_s(sums)) for name in PHASES}


def _histogram(column: pa.ChunkedArray) -> list[int]:
    """Add lists up entry by entry, the missing entries of shorter ones as 0."""
    lists = pa.chunked_array([column.drop_null().combine_chunks()])
    lengths = pc.list_value_length(lists).to_numpy()
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return [int(count) for count in np.bincount(places, weights=pc.list_flatten(lists).to_numpy())]


def _spread(column: pa.ChunkedArray) -> Values | None:
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


def _flagged(documents: pa.Table) -> dict[str, list[str]]:
    """Return by quality flag the first NUM_IDS ids, in their order, of the documents that have it."""
    documents = documents.combine_chunks()
    flags = pc.list_flatten(documents["quality_flags"])
    flagged = documents["doc_id"].take(pc.list_parent_indices(documents["quality_flags"]))
    table = pa.table({"flag": flags, "doc_id": flagged})
    return {flag: _first_ids(table.filter(pc.equal(flags, flag))) for flag in pc.unique(flags).to_pylist()}


def _first_ids(rows: pa.Table) -> list[str]:
    """Return the NUM_IDS first ids, in their order."""
    chosen = pc.select_k_unstable(rows, NUM_IDS, [("doc_id", "ascending")])
    return list(rows["doc_id"].take(chosen).to_pylist())


def _slowest(work: pa.Table) -> list[Values]:
    chosen = pc.select_k_unstable(work, NUM_SLOWEST, [("total_s", "descending"), ("doc_id", "ascending")])
    rows = work.select(list(dict.fromkeys((*_SLOWEST, "total_s", *PHASES, "started_at")))).take(chosen).to_pylist()
    for row in rows:
        row["started_at"] = row["started_at"] and row["started_at"].isoformat(timespec="milliseconds")
    return [row for row in rows if row["total_s"] is not None]


def limit_figures(documents: pa.Table, starts: Sequence[Start]) -> Values | None:
    """Compute the shares of their devices' limits that workers reached: matrix rate in prefill, bandwidth in steps.

    documents: finished ones (`RunFigures.done`). None if the limits of no document's worker are known.
    """
    limits = {
        worker.name: (worker.device, worker.limits)
        for start in starts
        for worker in start.workers or ()
        if worker.name is not None and worker.limits is not None and worker.limits.keys() >= _LIMITS
    }
    documents = documents.select(_LIMITED).drop_null()
    documents = documents.filter(pc.is_in(documents["worker"], pa.array([*limits], pa.string())))
    if not len(documents):
        return None
    sums: Counter[str] = Counter()
    for name in pc.unique(documents["worker"]).to_pylist():
        known = limits[name][1]
        kinds = [kind(**{spec.name: known[spec.name] for spec in fields(kind)}) for kind in _KINDS]
        sums.update(_seconds(documents.filter(pc.equal(documents["worker"], name)), *kinds))
    devices = Counter((device, values["read_bytes_per_s"], values["flop_per_s"]) for device, values in limits.values())
    names = ("device", "read_bytes_per_s", "flop_per_s", "workers")
    return {
        "documents": len(documents),
        "prefill_share": ratio(sums["prefill_limit_s"], sums["prefill_s"]),
        "verify_share": ratio(sums["verify_limit_s"], sums["verify_s"]),
        "devices": [dict(zip(names, (*device, count), strict=True)) for device, count in devices.most_common()],
    }


def _seconds(documents: pa.Table, machine: MachineLimits, work: ModelWork) -> dict[str, float]:
    """Return the seconds that a worker's documents took, and those that they would have taken at the limits.

    What was copied from another prompt is no work. The requests of a document in parts count as if they were equally
    long, which they are but for the last.
    """
    column = {name: documents[name].to_numpy() for name in _LIMITED if name != "worker"}
    requests = column["num_requests"]
    prompts, copied, outputs = (column[f"num_{name}_tokens"] / requests for name in ("prompt", "cached", "output"))
    read = zip(requests, prompts, copied, strict=True)
    flop = sum(count * work.prefill_flop(size, known) for count, size, known in read)
    steps = column["num_spec_steps"] + column["num_plain_steps"]
    cached = float(np.sum(steps * (prompts + outputs / 2)))
    num_bytes = float(column["num_forwards"].sum()) * work.weight_bytes + cached * work.kv_bytes_per_token
    return {
        "prefill_s": float(column["prefill_s"].sum()),
        "verify_s": float(column["verify_s"].sum()),
        "prefill_limit_s": flop / machine.flop_per_s,
        "verify_limit_s": num_bytes / machine.read_bytes_per_s,
    }
