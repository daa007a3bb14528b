"""What each worker did when, and the end of a run, when the last documents keep few workers busy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specextend.data.run_folder import WorkerRecord
from specextend.report.wall_clock import TimedDocuments, TimedStart, is_stopped

RESOLUTION = 400
"""Parts of a start's time; documents that are shorter are drawn as one span."""
MOST_STARTS = 6
MOST_LINES = 64
"""Seats that a time line shows."""
IDLE_SHARE = 0.05
"""Share of a start's time, at its end, from which on a worker without documents counts as idle."""


def timeline_section(starts: Sequence[TimedStart]) -> list[dict[str, Any]]:
    """Return the time lines of the last starts with workers or documents; seconds are since a start's beginning."""
    return [line for timed in starts if (line := _timeline(timed)) is not None][-MOST_STARTS:]


def _timeline(timed: TimedStart) -> dict[str, Any] | None:
    start, documents, begin, seconds = timed.start, timed.documents, timed.begin, timed.seconds
    if documents is None or begin is None or not seconds or np.isnan(documents.begins).any():
        return None
    by_worker = documents.by_worker()
    lines = [_line(worker, by_worker.pop(worker.name or "", None), begin, seconds) for worker in start.workers or ()]
    unrecorded = ((name, own) for name, own in by_worker.items() if len(own))
    lines += [_unrecorded(name, own, begin, seconds) for name, own in unrecorded]
    if not lines:
        return None
    lines.sort(key=lambda line: (line["seat"] is None, line["seat"] or 0, line["asked_s"] or 0.0))
    seats = list(dict.fromkeys(_place(line) for line in lines))
    shown = set(seats[:MOST_LINES])
    return {
        "run_id": start.run_id,
        "seconds": seconds,
        "seats_left_out": len(seats) - len(shown),
        "workers": [line for line in lines if _place(line) in shown],
    }


def _place(line: dict[str, Any]) -> int | str:
    return line["worker"] if line["seat"] is None else line["seat"]


def _line(worker: WorkerRecord, documents: TimedDocuments | None, begin: float, seconds: float) -> dict[str, Any]:
    """Describe one worker that its driver recorded."""
    times = {"asked_s": worker.asked, "begun_s": worker.begun, "ready_s": worker.ready, "gone_s": worker.gone}
    return {
        "worker": worker.worker,
        "seat": worker.seat,
        "device": worker.device,
        **{name: None if time is None else time - begin for name, time in times.items()},
        "reason": worker.reason,
        "documents": 0 if documents is None else len(documents),
        "spans": [] if documents is None else _spans(documents, begin, seconds),
    }


def _unrecorded(name: str, documents: TimedDocuments, begin: float, seconds: float) -> dict[str, Any]:
    """Describe a worker that only its rows know, because its driver was killed before it had recorded it."""
    times = dict.fromkeys(("asked_s", "begun_s", "ready_s", "gone_s"))
    known = {"worker": name, "seat": None, "device": None, **times, "reason": None, "documents": len(documents)}
    return known | {"spans": _spans(documents, begin, seconds)}


def _spans(documents: TimedDocuments, begin: float, seconds: float) -> list[tuple[float, float, int]]:
    """Return (begin, end, documents) of the times at work; documents too short to be seen apart share a span."""
    least = seconds / RESOLUTION
    spans: list[tuple[float, float, int]] = []
    order = np.argsort(documents.begins)
    for since, until in zip(documents.begins[order] - begin, documents.ends[order] - begin, strict=True):
        if spans:
            first, last, count = spans[-1]
            if since < last or (since - last <= least and last - first < least):
                spans[-1] = (first, max(last, float(until)), count + 1)
                continue
        spans.append((float(since), float(until), 1))
    return spans


def tail_section(starts: Sequence[TimedStart]) -> dict[str, Any] | None:
    """Describe the end of the last start that came to the end of its documents; None if it is not recorded."""
    finished = [(timed, timed.documents) for timed in starts if timed.documents]
    if not finished:
        return None
    timed, documents = finished[-1]
    if is_stopped(timed.start) or np.isnan(documents.ends).any():
        return None
    ends = np.sort(documents.ends)
    last = float(ends[-1])
    num_last = max(1, math.ceil(len(ends) / 100))
    before = float(ends[-num_last - 1]) if num_last < len(ends) else float(documents.begins.min())
    idle = np.array(sorted(_idle_seconds(timed, documents, last)))
    long = idle[idle > IDLE_SHARE * (timed.seconds or math.inf)]
    return {
        "run_id": timed.start.run_id,
        "documents": len(ends),
        "last_percent_documents": num_last,
        "last_percent_s": last - before,
        "last_worker_alone_s": float(idle[1]) if len(idle) > 1 else 0.0,
        "workers": len(idle),
        "idle_worker_s": float(idle.sum()),
        "idle_workers": len(long),
        "idle_median_s": float(np.median(long)) if len(long) else 0.0,
    }


def _idle_seconds(timed: TimedStart, documents: TimedDocuments, last: float) -> list[float]:
    """Return for each worker that was there at the end how long before the last document it had ended its own."""
    ends = {name: float(own.ends.max()) for name, own in documents.by_worker().items()}
    for worker in timed.start.workers or ():
        if worker.name is None or worker.ready is None:
            continue
        if worker.gone is not None and worker.gone < last:
            ends.pop(worker.name, None)
        else:
            ends[worker.name] = max(worker.ready, ends.get(worker.name, worker.ready))
    return [max(0.0, last - end) for end in ends.values()]
