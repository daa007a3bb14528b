"""The wall clock of a run: how long its starts took, what its workers did meanwhile, and what that cost.

A worker is paid for from the moment it has a process until it is released. What it does in that time is one of KINDS:
they add up to the worker-seconds that were paid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from specextend.data.run_folder import RELEASED, Start, WorkerRecord, parse_time, time_text
from specextend.report.rows import RUN_ID
from specextend.stats import PHASES, ratio

PREFILL = ("prefill_s", "draft_prefill_s")
OTHER = ("other_s",)
DECODE = tuple(name for name in PHASES if name not in PREFILL + OTHER)
BUSY = {"prefill": PREFILL, "decode": DECODE, "other": OTHER}
"""Kinds of time at work on documents that are done, each with the phases that it joins."""
KINDS = (*BUSY, "audit", "waiting", "lost", "loading", "dead")
"""What a worker's time is spent on.

`audit`: decoding documents again (`decoding.audit_fraction`). `waiting`: ready, and at none of these. `lost`: from the
last document of a worker that died, or whose start was stopped, to its end. `loading`: until the first worker of a seat
is ready. `dead`: from the end of a worker to the moment when its successor is ready.
"""
FINISHED = (0, 3)
"""Exit codes of a start that came to the end of its documents."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class TimedDocuments:
    """Finished documents as columns of N entries; times are seconds since the epoch, NaN if they are not recorded."""

    run_ids: NDArray[np.str_]
    """Empty if it is not known which start finished a document."""
    workers: NDArray[np.str_]
    begins: NDArray[np.float64]
    ends: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    busy: Mapping[str, NDArray[np.float64]]
    """Seconds by the kinds of BUSY."""

    def __len__(self) -> int:
        return len(self.run_ids)

    def where(self, mask: NDArray[np.bool_]) -> TimedDocuments:
        """Select documents."""
        return TimedDocuments(
            run_ids=self.run_ids[mask],
            workers=self.workers[mask],
            begins=self.begins[mask],
            ends=self.ends[mask],
            prompt_tokens=self.prompt_tokens[mask],
            output_tokens=self.output_tokens[mask],
            busy={kind: seconds[mask] for kind, seconds in self.busy.items()},
        )

    def by_worker(self) -> dict[str, TimedDocuments]:
        """Group documents by the worker that did them."""
        names, codes = np.unique(self.workers, return_inverse=True)
        return {str(name): self.where(codes == code) for code, name in enumerate(names)}


def timed_documents(table: pa.Table) -> TimedDocuments:
    """Turn rows of TIMED and RUN_ID into columns."""
    begins = _floats(pc.cast(table["started_at"], pa.int64())) / 1000
    return TimedDocuments(
        run_ids=_texts(table[RUN_ID]),
        workers=_texts(table["worker"]),
        begins=begins,
        ends=begins + _floats(table["total_s"]),
        prompt_tokens=_floats(table["num_prompt_tokens"], 0.0),
        output_tokens=_floats(table["num_output_tokens"], 0.0),
        busy={kind: np.sum([_floats(table[name], 0.0) for name in names], axis=0) for kind, names in BUSY.items()},
    )


def _texts(column: pa.ChunkedArray) -> NDArray[np.str_]:
    return np.array(pc.fill_null(column, "").to_pylist(), np.str_)


def _floats(column: pa.ChunkedArray, missing: float = np.nan) -> NDArray[np.float64]:
    return pc.fill_null(pc.cast(column, pa.float64()), missing).to_numpy()


@dataclass(frozen=True, slots=True)
class TimedStart:
    """A start with its span of time and the documents that it finished."""

    start: Start
    documents: TimedDocuments | None
    """None if it is not known which start finished which document."""
    begin: float | None
    end: float | None
    """Its end, or the last sign of life of a start whose end is not recorded."""
    paid: Mapping[str, float] | None
    """The worker-seconds that were paid, by KINDS; None if they are not recorded."""

    @property
    def seconds(self) -> float | None:
        """Return how long the start took."""
        return None if self.begin is None or self.end is None else max(0.0, self.end - self.begin)


def is_stopped(start: Start) -> bool:
    """Return True if a start ended before its documents did, as far as is known."""
    return start.exit_code not in FINISHED


def _paid_seconds(
    start: Start, documents: TimedDocuments | None, end: float | None, audit_s: float
) -> dict[str, float] | None:
    """Return the worker-seconds of a start that were paid, by KINDS; None if they are not recorded."""
    if start.workers is None or documents is None or end is None:
        return None
    seats: defaultdict[int, list[WorkerRecord]] = defaultdict(list)
    for worker in start.workers:
        seats[worker.seat].append(worker)
    paid, ready = dict.fromkeys(KINDS, 0.0), _ready_spans(start, end)
    for seat in seats.values():
        _add(paid, _seat_seconds(sorted(seat, key=lambda worker: worker.asked), ready, end))
    by_worker = documents.by_worker()
    for name in {*by_worker, *ready}:
        _add(paid, _worker_seconds(ready.get(name), by_worker.get(name)))
    for kind in ("waiting", "lost"):  # rows of documents do not know of the audit
        moved = min(audit_s - paid["audit"], paid[kind])
        paid["audit"] += moved
        paid[kind] -= moved
    return paid


@dataclass(frozen=True, slots=True)
class ReadySpan:
    """The time in which a worker could take documents, in seconds since the epoch."""

    since: float
    until: float
    is_cut_off: bool
    """True if it may have been at work on a document when it ended."""


def _ready_spans(start: Start, end: float) -> dict[str, ReadySpan]:
    """Return when each worker was ready, by `host:pid`."""
    return {
        worker.name: ReadySpan(
            worker.ready,
            max(worker.ready, end if worker.gone is None else worker.gone),
            is_stopped(start) or worker.reason not in (None, RELEASED),
        )
        for worker in start.workers or ()
        if worker.name is not None and worker.ready is not None
    }


def _worker_seconds(span: ReadySpan | None, documents: TimedDocuments | None) -> dict[str, float]:
    """Divide the time in which a worker was ready; one that only its rows know was busy, and no more."""
    busy = {kind: float(documents.busy[kind].sum()) if documents else 0.0 for kind in BUSY}
    if span is None:
        return busy
    there, total = span.until - span.since, sum(busy.values())
    if total > there:  # parts of documents that an earlier start has decoded are in its rows
        busy = {kind: seconds * there / total for kind, seconds in busy.items()}
    idle = max(0.0, there - total)
    lost = 0.0
    if span.is_cut_off and (documents is None or not np.isnan(documents.ends).any()):
        last = span.since if documents is None else max(span.since, float(documents.ends.max()))
        lost = min(idle, max(0.0, span.until - last))
    return {**busy, "lost": lost, "waiting": idle - lost}


def _seat_seconds(workers: Sequence[WorkerRecord], ready: Mapping[str, ReadySpan], end: float) -> dict[str, float]:
    """Return the seconds in which a seat was paid for and had no worker that was ready."""
    begun = [worker.begun for worker in workers if worker.begun is not None]
    if not begun:
        return {}
    last = workers[-1].gone
    paid_from = min(begun)
    paid_to = max(paid_from, end if last is None else last)
    spans = [ready[worker.name] for worker in workers if worker.name is not None and worker.name in ready]
    first = min((span.since for span in spans), default=paid_to)
    away = paid_to - paid_from - sum(span.until - span.since for span in spans)
    loading = max(0.0, min(first, paid_to) - paid_from)
    return {"loading": loading, "dead": max(0.0, away - loading)}


def _add(sums: dict[str, float], seconds: Mapping[str, float]) -> None:
    for kind, value in seconds.items():
        sums[kind] += value


def timed_starts(
    starts: Iterable[Start],
    documents: TimedDocuments,
    heartbeat: tuple[str, float] | None,
    audit_s: Mapping[str, float],
) -> list[TimedStart]:
    """Find when each start began and ended, and what its workers did.

    heartbeat: run id and time of the driver whose lock is in the folder. audit_s: seconds of the audit by run id.
    """
    starts = list(starts)
    beats = [start.took_over for start in starts] + [heartbeat]
    is_known = bool(np.all(documents.run_ids != ""))
    timed = []
    for start in starts:
        own = documents.where(documents.run_ids == start.run_id) if is_known else None
        signs = [time for beat in beats if beat is not None for run_id, time in [beat] if run_id == start.run_id]
        end = _end(start, own, signs)
        paid = _paid_seconds(start, own, end, audit_s.get(start.run_id, 0.0))
        timed.append(TimedStart(start, own, parse_time(start.begin), end, paid))
    return timed


def _end(start: Start, documents: TimedDocuments | None, signs: list[float]) -> float | None:
    """Return the end of a start, or its last sign of life: a heartbeat, a document, a write of its record."""
    if (end := parse_time(start.end)) is not None:
        return end
    signs += [] if start.seen is None else [start.seen]
    if documents is not None and not np.isnan(documents.ends).all():
        signs.append(float(np.nanmax(documents.ends)))
    return max(signs, default=None)


def start_section(timed: TimedStart) -> dict[str, Any]:
    """Describe one start; what is not recorded is null."""
    start, documents = timed.start, timed.documents
    names = ("run_id", "begin", "end", "exit_code", "versions", "git_commit")
    is_open = start.end is None and timed.end is not None
    return {
        **{name: getattr(start, name) for name in names},
        "last_sign": time_text(timed.end) if is_open and timed.end is not None else None,
        "seconds": timed.seconds,
        "documents": None if documents is None else len(documents),
        "documents_per_hour": None if documents is None else _per_hour(len(documents), timed.seconds),
        "workers": _worker_counts(start.workers),
        "worker_hours": None if timed.paid is None else sum(timed.paid.values()) / HOUR_S,
        "gpus_per_worker": start.gpus_per_worker,
        "paid_s": timed.paid,
        "forecast": _forecast(timed),
    }


def _worker_counts(workers: tuple[WorkerRecord, ...] | None) -> dict[str, int] | None:
    if workers is None:
        return None
    return {
        "asked": len(workers),
        "seats": len({worker.seat for worker in workers}),
        "never_begun": sum(worker.begun is None for worker in workers),
        "ready": sum(worker.ready is not None for worker in workers),
        "failed_to_start": sum(worker.ready is None and worker.reason not in (None, RELEASED) for worker in workers),
        "died": sum(worker.ready is not None and worker.reason not in (None, RELEASED) for worker in workers),
    }


def _decoding_s(timed: TimedStart) -> float | None:
    """Return the seconds from the first worker's start to the last document, which is what a forecast is about."""
    asked = min((worker.asked for worker in timed.start.workers or ()), default=None)
    if asked is None or timed.documents is None or not len(timed.documents) or np.isnan(timed.documents.ends).all():
        return None
    return max(0.0, float(np.nanmax(timed.documents.ends)) - asked)


def _forecast(timed: TimedStart) -> dict[str, Any] | None:
    """Compare the forecast of a start with what happened; a start that was stopped shows no actual time."""
    forecast = timed.start.forecast
    if forecast is None:
        return None
    predicted = forecast.get("seconds")
    predicted = float(predicted) if isinstance(predicted, int | float) and predicted > 0 else None
    actual = None if is_stopped(timed.start) else _decoding_s(timed)
    return {
        "predicted_s": predicted,
        "low_s": forecast.get("seconds_low"),
        "high_s": forecast.get("seconds_high"),
        "basis": forecast.get("basis"),
        "actual_s": actual,
        "actual_over_predicted": None if predicted is None or actual is None else actual / predicted,
    }


def wall_clock_section(
    starts: Sequence[TimedStart], documents: TimedDocuments, price_per_worker_hour: float | None
) -> dict[str, Any]:
    """Add up the starts of a run: rates of the whole job, hours, shares of the paid time, cost."""
    seconds = _sum_known([timed.seconds for timed in starts])
    paid = _paid(starts)
    hours = None if paid is None else sum(paid.values()) / HOUR_S
    return {
        "seconds": seconds,
        "is_exact": bool(starts) and all(timed.start.end is not None for timed in starts),
        "documents_per_hour": _per_hour(len(documents), seconds),
        "prompt_tokens_per_s": ratio(float(documents.prompt_tokens.sum()), seconds) if seconds else None,
        "output_tokens_per_s": ratio(float(documents.output_tokens.sum()), seconds) if seconds else None,
        "worker_hours": hours,
        "gpu_hours": _gpu_hours(starts),
        "paid_s": paid,
        "shares": None if not paid or not hours else {kind: value / sum(paid.values()) for kind, value in paid.items()},
        "cost": _cost(price_per_worker_hour, hours, documents),
    }


def _paid(starts: Sequence[TimedStart]) -> dict[str, float] | None:
    """Add up the worker-seconds of all starts by kind; None if those of one are not recorded."""
    each = [timed.paid for timed in starts]
    known = [paid for paid in each if paid is not None]
    if not known or len(known) < len(each):
        return None
    return {kind: sum(paid[kind] for paid in known) for kind in KINDS}


def _gpu_hours(starts: Sequence[TimedStart]) -> float | None:
    each = [(timed.paid, timed.start.gpus_per_worker) for timed in starts]
    known = [sum(paid.values()) * gpus / HOUR_S for paid, gpus in each if paid is not None and gpus is not None]
    return sum(known) if known and len(known) == len(each) else None


def _cost(price: float | None, hours: float | None, documents: TimedDocuments) -> dict[str, float | None] | None:
    """Return what the run cost, in the currency of the price; None without a price or without hours."""
    if price is None or hours is None:
        return None
    total = price * hours
    return {
        "price_per_worker_hour": price,
        "total": total,
        "per_thousand_documents": ratio(1e3 * total, len(documents)),
        "per_million_output_tokens": ratio(1e6 * total, float(documents.output_tokens.sum())),
    }


def _per_hour(count: int, seconds: float | None) -> float | None:
    return ratio(HOUR_S * count, seconds) if seconds else None


def _sum_known(values: Sequence[float | None]) -> float | None:
    """Add values up; None if there are none or one is None."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
