"""The share of their devices' limits that workers reached: matrix rate in prefill, memory bandwidth in verification."""

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

LIMITED = (
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
"""Columns of a finished document that the shares follow from."""
_ALL = {spec.name for kind in (MachineLimits, ModelWork) for spec in fields(kind)}


def limits_section(documents: pa.Table, starts: Sequence[Start]) -> dict[str, Any] | None:
    """Compute the shares over the LIMITED columns of documents whose worker's limits are known; None if there are none.

    What was copied from another prompt is no work. The requests of a document in parts count as if they were equally
    long, which they are but for the last.
    """
    limits = {
        worker.name: (worker.device, worker.limits)
        for start in starts
        for worker in start.workers or ()
        if worker.name is not None and worker.limits is not None and worker.limits.keys() >= _ALL
    }
    for name, before in (("num_requests", 1), ("num_cached_tokens", 0)):  # older versions knew neither
        column = pc.fill_null(documents[name], before)
        documents = documents.set_column(documents.column_names.index(name), name, column)
    documents = documents.select([*LIMITED]).drop_null()
    documents = documents.filter(pc.is_in(documents["worker"], pa.array([*limits], pa.string())))
    if not len(documents):
        return None
    sums: Counter[str] = Counter()
    for name in pc.unique(documents["worker"]).to_pylist():
        of_worker = documents.filter(pc.equal(documents["worker"], name))
        sums.update(_seconds(of_worker, *_parse(limits[name][1])))
    devices = Counter(
        (device, machine["read_bytes_per_s"], machine["flop_per_s"]) for device, machine in limits.values()
    )
    names = ("device", "read_bytes_per_s", "flop_per_s", "workers")
    return {
        "documents": len(documents),
        "prefill_share": ratio(sums["prefill_limit_s"], sums["prefill_s"]),
        "verify_share": ratio(sums["verify_limit_s"], sums["verify_s"]),
        "devices": [dict(zip(names, (*device, count), strict=True)) for device, count in devices.most_common()],
    }


def _parse(values: dict[str, float]) -> tuple[MachineLimits, ModelWork]:
    machine, work = ({spec.name: values[spec.name] for spec in fields(kind)} for kind in (MachineLimits, ModelWork))
    return MachineLimits(**machine), ModelWork(**work)  # type: ignore[arg-type]  # whole numbers stay whole in JSON


def _seconds(documents: pa.Table, machine: MachineLimits, work: ModelWork) -> dict[str, float]:
    """Return the seconds that a worker's documents took, and those that they would have taken at the limits."""
    column = {name: documents[name].to_numpy() for name in LIMITED if name != "worker"}
    requests = column["num_requests"]
    names = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
    prompts, copied, outputs = (column[name] / requests for name in names)
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
