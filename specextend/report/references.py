"""A run beside what it can be measured against: plain decoding (the audit), and the limits of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specextend.data.run_folder import Start
from specextend.decoding.limits import MachineLimits, ModelWork
from specextend.stats import ratio

NEAR_TIES = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""Gap in logits, by the target's dtype, up to which a difference is one of rounding (`docs/log.md`)."""
MOST_EXAMPLES = 5
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
_LIMITS = {spec.name for kind in (MachineLimits, ModelWork) for spec in fields(kind)}


def audit_figures(rows: pa.Table, dtype: str) -> dict[str, Any] | None:
    """Say whether audited summaries agree with plain decoding, and how much faster they were; None without an audit.

    rows: of AUDIT_SCHEMA; a document counts once, however often it was audited. dtype: of the target.
    """
    keys = zip(rows["file"].to_pylist(), rows["row"].to_pylist(), strict=True)
    places = {key: place for place, key in enumerate(keys)}
    if not places:
        return None
    rows = rows.take(pa.array(sorted(places.values())))
    compared = rows.filter(rows["error"].is_null())
    gaps = compared.filter(compared["gap"].is_valid())
    different = gaps.filter(pc.greater(gaps["gap"], NEAR_TIES[dtype]))
    return {
        "documents": len(rows),
        "failed": len(rows) - len(compared),
        "equal": len(compared) - len(gaps),
        "near_ties": len(gaps) - len(different),
        "different": len(different),
        "different_doc_ids": different["doc_id"].to_pylist()[:MOST_EXAMPLES],
        "near_tie_gap": NEAR_TIES[dtype],
        "largest_gap": pc.max(gaps["gap"]).as_py(),
        "token_agreement": ratio(_sum(compared["num_equal_tokens"]), _sum(compared["num_tokens"])),
        "seconds": _sum(rows["plain_prefill_s"]) + _sum(rows["plain_s"]),
        "speedup": _speedup(compared),
    }


def audit_seconds(rows: pa.Table) -> dict[str, float]:
    """Add up the seconds of plain decoding by start, from rows of AUDIT_SCHEMA."""
    seconds = pc.add(rows["plain_prefill_s"].fill_null(0), rows["plain_s"].fill_null(0))
    sums = pa.table({"run_id": rows["run_id"], "s": seconds}).group_by("run_id").aggregate([("s", "sum")])
    return dict(zip(sums["run_id"].to_pylist(), sums["s_sum"].to_pylist(), strict=True))


def _speedup(rows: pa.Table) -> dict[str, Any] | None:
    """Compare seconds per token with and without a draft, summed over documents of two tokens or more.

    Only documents in batches as large as the job's count: a smaller batch of plain decoding pays more for each token.
    """
    several = pc.and_(pc.greater(rows["num_tokens"], 1), pc.greater(rows["num_plain_tokens"], 1))
    rows = rows.filter(pc.and_(several, rows["is_full_batch"]))
    if not len(rows):
        return None
    decode, whole = [], []
    for names in (("num_plain_tokens", "plain_s", "plain_prefill_s"), ("num_tokens", "speculative_s", "prefill_s")):
        tokens, seconds, prefill = (_sum(rows[name]) for name in names)
        decode.append(seconds / (tokens - len(rows)))
        whole.append((seconds + prefill) / tokens)
    return {
        "documents": len(rows),
        "batch_size": rows["batch_size"][0].as_py(),
        "decode": ratio(*decode),
        "end_to_end": ratio(*whole),
    }


def limit_figures(documents: pa.Table, starts: Sequence[Start]) -> dict[str, Any] | None:
    """Compute the shares of their devices' limits that workers reached: matrix rate in prefill, bandwidth in steps.

    documents: finished ones (DONE_COLUMNS). None if the limits of no document's worker are known.
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
        kinds = (_parse(kind, limits[name][1]) for kind in (MachineLimits, ModelWork))
        sums.update(_seconds(documents.filter(pc.equal(documents["worker"], name)), *kinds))
    devices = Counter((device, values["read_bytes_per_s"], values["flop_per_s"]) for device, values in limits.values())
    names = ("device", "read_bytes_per_s", "flop_per_s", "workers")
    return {
        "documents": len(documents),
        "prefill_share": ratio(sums["prefill_limit_s"], sums["prefill_s"]),
        "verify_share": ratio(sums["verify_limit_s"], sums["verify_s"]),
        "devices": [dict(zip(names, (*device, count), strict=True)) for device, count in devices.most_common()],
    }


def _parse(kind: Any, values: dict[str, float]) -> Any:
    return kind(**{spec.name: values[spec.name] for spec in fields(kind)})


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


def _sum(column: pa.ChunkedArray) -> float:
    return pc.sum(column).as_py() or 0
