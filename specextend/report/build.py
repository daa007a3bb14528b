"""Building the report of a run folder from its rows, and writing it to files."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.core import one_line
from specextend.data.fingerprint import num_input_rows, read_manifest
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.parts import find_results, read_part
from specextend.data.run_folder import errors_folder, read_starts, report_file, summaries_folder
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location, list_files, resolve, write_bytes
from specextend.report.sections import to_markdown
from specextend.report.statistics import COLUMNS, Tally, bucket_name, bucket_of, spread

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
_BATCH_ROWS = 16_384


def write_report(
    output: str,
    folder: Location | None = None,
    *,
    ending: Mapping[str, Any] | None = None,
    checkpoint: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Write `report.json` and `report.md` into a run folder (a path or URI), each whole or not at all.

    Returns the report; its arguments are those of `build_report`. The run may still be going. Raises ValueError if the
    folder holds no run or a damaged one.
    """
    location = folder or resolve(output)
    report = build_report(output, location, ending=ending, checkpoint=checkpoint)
    write_bytes(report_file(location, "json"), to_json(report))
    write_bytes(report_file(location, "md"), to_markdown(report).encode())
    return report


def to_json(values: dict[str, Any]) -> bytes:
    """Encode values as JSON in UTF-8. Half of a surrogate pair, which UTF-8 does not have, becomes a JSON escape."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def build_report(
    output: str,
    folder: Location | None = None,
    *,
    ending: Mapping[str, Any] | None = None,
    checkpoint: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Build the report of a run folder as JSON values: seconds, tokens, shares (0 to 1); null if there is no value.

    The run may still be going. folder: the location of `output`, if it is open already. ending: `run_id`, `end` and
    `exit_code` of a start whose record does not contain them yet. checkpoint: called between tables; may raise. Raises
    ValueError if the folder holds no run or a damaged one.
    """
    location = folder or resolve(output)
    rows = _Rows(location)
    done, errors = _DoneFigures(), _Errors()
    for table in rows.read(_DONE_COLUMNS, done=True):
        checkpoint()
        done.add(table)
    for table in rows.read(_ERROR_COLUMNS, done=False):
        checkpoint()
        errors.add(table)
    manifest = read_manifest(location)
    report = {
        "output": output,
        "source": rows.source,
        "run": _run(manifest),
        "attempts": _attempts(location, ending or {}),
        "rows": _row_counts(manifest, done.tally.num_documents, errors.num_rows),
        **done.report(),
        "errors": errors.report(),
    }
    return {name: _finite(value) for name, value in report.items()}


class _Rows:
    """The valid rows of a run folder, one for each document that has ended, as tables.

    They are read from the commits in `_run/parts`, which are complete at any time. A copy of the folder without them is
    read from `summaries/` and `errors/`. Raises ValueError if the folder has neither.
    """

    def __init__(self, output: Location) -> None:
        self._output, self._results = output, find_results(output)
        self.source: Literal["parts", "summaries"] = "parts" if self._results.names else "summaries"
        files = [*self._files(summaries_folder(output)), *self._files(errors_folder(output))]
        if not self._results.names and not files:
            raise ValueError(f"{output.path} holds no run: neither _run/parts nor summaries")

    def read(self, columns: Sequence[str], *, done: bool) -> Iterator[pa.Table]:
        """Read columns of the finished documents, or of the failed ones."""
        if self.source == "summaries":
            yield from self._read_files((summaries_folder if done else errors_folder)(self._output), columns)
            return
        results = self._results
        order = np.lexsort((results.offsets, results.parts))
        chosen = order[results.done[order] == done]
        ends = np.searchsorted(results.parts[chosen], np.arange(len(results.names)), side="right")
        for name, positions in zip(results.names, np.split(chosen, ends[:-1]), strict=True):
            yield read_part(self._output, name, columns).take(pa.array(results.offsets[positions]))

    def _read_files(self, folder: Location, columns: Sequence[str]) -> Iterator[pa.Table]:
        schema = pa.schema([PART_SCHEMA.field(name) for name in columns])
        for file in self._files(folder):
            try:
                with pq.ParquetFile(file.path, filesystem=file.filesystem) as parquet:
                    for batch in parquet.iter_batches(_BATCH_ROWS, columns=list(columns)):
                        yield pa.Table.from_batches([batch]).select(columns).cast(schema)
            except (*DAMAGED, KeyError) as error:
                if not is_damaged(file, error):
                    raise
                raise ValueError(
                    f"{file.path} is damaged ({one_line(error)}); run the job again to write it anew"
                ) from error

    def _files(self, folder: Location) -> list[Location]:
        return [folder.child(name) for name in list_files(folder) if name.endswith(".parquet")]


@dataclass(slots=True)
class _DoneFigures:
    """Figures of the finished documents, collected table by table."""

    tally: Tally = field(default_factory=Tally)
    buckets: defaultdict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    values: defaultdict[str, list[NDArray[np.float64]]] = field(default_factory=lambda: defaultdict(list))
    """One number per document, for the spreads."""
    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, rows: pa.Table) -> None:
        rows = _without_nan(rows)
        self.tally.add(rows)
        buckets = np.array([bucket_of(tokens) for tokens in rows["num_prompt_tokens"].fill_null(0).to_pylist()])
        for bucket in np.unique(buckets).tolist():
            self.buckets[bucket].add(rows.filter(pa.array(buckets == bucket)))
        for name in _PER_DOCUMENT:
            self.values[name].append(rows[name].drop_null().to_numpy())
        self.values["decode_tokens_per_s"].append(_decode_speeds(rows))
        for name in ("finish_reason", "worker"):
            self.counts[name].update(rows[name].drop_null().to_pylist())
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
            "per_document": {name: _spread(np.concatenate(values).tolist()) for name, values in self.values.items()},
            "buckets": [_bucket(bucket, self.buckets[bucket]) for bucket in sorted(self.buckets)],
            "finish_reasons": _falling(self.counts["finish_reason"]),
            "quality_flags": _falling(self.counts["quality_flags"]),
            "workers": _falling(self.counts["worker"]),
        }


@dataclass(slots=True)
class _Errors:
    """Counts of the failed documents by class and stage, with one example each."""

    counts: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, bool], tuple[str, str]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.counts.total()

    def add(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            kind = (row["error_class"], row["stage"] or "", row["retryable"])
            self.counts[kind] += 1
            self.examples.setdefault(kind, (row["doc_id"] or "", row["message"] or ""))

    def report(self) -> list[dict[str, Any]]:
        names = ("error_class", "stage", "retryable", "rows", "example_doc_id", "example_message")
        return [
            dict(zip(names, (*kind, rows, *self.examples[kind]), strict=True))
            for kind, rows in self.counts.most_common()
        ]


def _run(manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """Select from the configuration what a reader of the figures must know."""
    if manifest is None:
        return None
    config = manifest["config"]
    sections = ("target", "draft", "decoding", "attention", "tree", "cache")
    return {"fingerprint": manifest["fingerprint"], **{name: config.get(name) for name in sections}}


def _attempts(output: Location, ending: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List every start of the run, oldest first; one of them may be about to end."""
    names = ("run_id", "begin", "end", "exit_code", "versions")
    records = [{name: getattr(start, name) for name in names} for start in read_starts(output)]
    return [record | dict(ending) if record["run_id"] == ending.get("run_id") else record for record in records]


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null, at any depth."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row_counts(manifest: dict[str, Any] | None, done: int, errors: int) -> dict[str, int | None]:
    rows = None if manifest is None else num_input_rows(manifest)
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
