"""The wall clock of a run: how long its starts took, what each worker did when, how a run ended, and what it cost.

A worker is paid for from the moment it has a process until it is released. What it does in that time is one of KINDS:
they add up to the worker-seconds that were paid.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np

from specextend.core import ReadOnly, Values
from specextend.data.run_folder import RELEASED, Heartbeat, Start, WorkerRecord, parse_time, time_text
from specextend.report.figures import RunFigures
from specextend.report.result_rows import RUN_ID
from specextend.stats import ratio

BUSY = ("prefill", "decode", "other")
"""Kinds of time at work on documents that are done."""
_WORKS = """
    SELECT run_id, worker, count(*) AS n, max(ended) AS last,
        coalesce(sum(prefill_s), 0) + coalesce(sum(draft_prefill_s), 0) AS prefill,
        coalesce(sum(draft_s), 0) + coalesce(sum(verify_s), 0) + coalesce(sum(retrieval_s), 0) AS decode,
        coalesce(sum(other_s), 0) AS other
    FROM work GROUP BY ALL ORDER BY worker
"""
KINDS = (*BUSY, "waiting", "lost", "loading", "dead")
"""What a worker's time is spent on.

`waiting`: ready, and at none of these. `lost`: from the last document of a worker that died, or whose start was
stopped, to its end. `loading`: until the first worker of a seat is ready. `dead`: from the end of a worker to the
moment when its successor is ready.
"""
FINISHED = (0, 3)
"""Exit codes of a start that came to the end of its documents."""
RESOLUTION = 400
"""Parts of a start's time; documents that are shorter are drawn as one span."""
MOST_STARTS = 6
MOST_SEATS = 64
"""Starts and seats that the time line shows."""
IDLE_SHARE = 0.05
"""Share of a start's time, at its end, from which on a worker without documents counts as idle."""
HOUR_S = 3600.0
_TIMES = "SELECT worker, began, ended FROM work WHERE run_id = ? AND ended IS NOT NULL ORDER BY worker, began"
PARTS = 40
"""Parts of a start's time, for each of which the documents that ended are counted."""
_ENDED = f"""
    SELECT count(ended) AS documents FROM range({PARTS}) AS parts (part) LEFT JOIN (
        SELECT ended, least({PARTS - 1}, floor((ended - ?) / ? * {PARTS}))::BIGINT AS part
        FROM work WHERE run_id = ? AND ended IS NOT NULL
    ) USING (part) GROUP BY part ORDER BY part
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """The documents that one worker finished in one start."""

    documents: int
    busy: Mapping[str, float]
    """Seconds by the kinds of BUSY."""
    end: float | None
    """When the last of them was finished, in seconds since the epoch; None if that is not recorded."""


@dataclass(frozen=True)
class TimedStart:
    """A start with its span of time and what its workers did in it. Times are seconds since the epoch."""

    start: Start
    works: Mapping[str, Work] | None
    """By `host:pid`; None if it is not known which start finished which document."""
    begin: float | None
    end: float | None
    """Its end, or the last sign of life of a start whose end is not recorded."""
    paid: Mapping[str, float] | None
    """The worker-seconds that were paid, by KINDS; None if they are not recorded."""

    @property
    def seconds(self) -> float | None:
        """Return how long the start took."""
        return None if self.begin is None or self.end is None else max(0.0, self.end - self.begin)

    @property
    def documents(self) -> int | None:
        """Count the documents that the start finished."""
        return None if self.works is None else sum(work.documents for work in self.works.values())

    @property
    def worker_hours(self) -> float | None:
        """Return the hours of workers that were paid."""
        return None if self.paid is None else sum(self.paid.values()) / HOUR_S

    @property
    def gpu_hours(self) -> float | None:
        """Return the hours of GPUs that were paid."""
        hours, gpus = self.worker_hours, self.start.gpus_per_worker
        return None if hours is None or gpus is None else hours * gpus


def timed_starts(starts: Iterable[Start], figures: RunFigures, heartbeat: Heartbeat | None) -> list[TimedStart]:
    """Find when each start began and ended, and what its workers did.

    heartbeat: of the driver whose lock is in the folder.
    """
    starts = list(starts)
    signs = [start.took_over for start in starts] + [heartbeat]
    works = _works(figures)
    timed = []
    for start in starts:
        own = None if works is None else works.get(start.run_id, {})
        beats = [sign.heartbeat for sign in signs if sign is not None and sign.run_id == start.run_id]
        end = parse_time(start.end)
        if end is None:
            work_ends = [work.end for work in (own or {}).values()]
            end = max(_known([*beats, start.seen, *work_ends]), default=None)
        paid = _paid_seconds(start, own, end)
        timed.append(TimedStart(start, own, parse_time(start.begin), end, paid))
    return timed


def _works(figures: RunFigures) -> dict[str, dict[str, Work]] | None:
    """Return the work of each worker by run id; None if the start of a document is not known."""
    works: defaultdict[str, dict[str, Work]] = defaultdict(dict)
    for row in figures.select(_WORKS):
        if row[RUN_ID] is None:
            return None
        works[row[RUN_ID]][row["worker"]] = Work(row["n"], {kind: row[kind] for kind in BUSY}, row["last"])
    return works


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def is_stopped(start: Start) -> bool:
    """Return True if a start ended before its documents did, as far as is known."""
    return start.exit_code not in FINISHED


def _paid_seconds(start: Start, works: Mapping[str, Work] | None, end: float | None) -> dict[str, float] | None:
    """Return the worker-seconds of a start that were paid, by KINDS; None if they are not recorded."""
    if start.workers is None or works is None or end is None:
        return None
    paid = dict.fromkeys(KINDS, 0.0)
    for work in works.values():
        for kind, seconds in work.busy.items():
            paid[kind] += seconds
    for _, seat in groupby(sorted(start.workers, key=attrgetter("seat", "asked")), attrgetter("seat")):
        for kind, seconds in _seat_seconds(list(seat), works, end, is_stopped(start)).items():
            paid[kind] += seconds
    return paid


def _seat_seconds(
    workers: Sequence[WorkerRecord], works: Mapping[str, Work], end: float, is_cut_off: bool
) -> dict[str, float]:
    """Return the seconds in which a seat was paid for and its workers, one after another, were at no document.

    is_cut_off: they may have been at work on documents when their start ended.
    """
    begun = _known(worker.begun for worker in workers)
    if not begun:
        return {}
    last_gone = workers[-1].gone
    paid_to = max(min(begun), end if last_gone is None else last_gone)
    first, there, waiting, lost = paid_to, 0.0, 0.0, 0.0
    for worker in workers:
        if worker.name is None or worker.ready is None:
            continue
        until = max(worker.ready, end if worker.gone is None else worker.gone)
        work = works.get(worker.name, Work(0, {}, worker.ready))
        idle = max(0.0, until - worker.ready - sum(work.busy.values()))
        if work.end is not None and (is_cut_off or worker.reason not in (None, RELEASED)):
            cut = min(idle, max(0.0, until - max(worker.ready, work.end)))
            lost, idle = lost + cut, idle - cut
        first, there, waiting = min(first, worker.ready), there + until - worker.ready, waiting + idle
    loading = max(0.0, first - min(begun))
    dead = max(0.0, paid_to - min(begun) - there - loading)
    return {"waiting": waiting, "lost": lost, "loading": loading, "dead": dead}


def wall_clock_section(
    starts: Sequence[TimedStart], num_documents: int, prompt_tokens: int, output_tokens: int
) -> Values:
    """Add up the starts of a run: rates of the whole job, hours, shares of the paid time, cost."""
    seconds = _sum_known([timed.seconds for timed in starts])
    known = _known(timed.paid for timed in starts)
    is_known = known and len(known) == len(starts)
    paid = {kind: sum(each[kind] for each in known) for kind in KINDS} if is_known else None
    total = None if paid is None else sum(paid.values())
    hours = None if total is None else total / HOUR_S
    prices = _known(timed.start.price_per_worker_hour for timed in starts)
    return {
        "seconds": seconds,
        "is_exact": bool(starts) and all(timed.start.end is not None for timed in starts),
        "documents_per_hour": ratio(HOUR_S * num_documents, seconds),
        "prompt_tokens_per_s": ratio(prompt_tokens, seconds),
        "output_tokens_per_s": ratio(output_tokens, seconds),
        "worker_hours": hours,
        "gpu_hours": _sum_known([timed.gpu_hours for timed in starts]),
        "paid_s": paid,
        "shares": {kind: value / total for kind, value in paid.items()} if paid and total else None,
        "cost": _cost(prices[-1], hours, num_documents, output_tokens) if prices and hours is not None else None,
    }


def _cost(price: float, hours: float, num_documents: int, output_tokens: int) -> dict[str, float | None]:
    """Return what the run cost, in the currency of the price."""
    total = price * hours
    return {
        "price_per_worker_hour": price,
        "total": total,
        "per_thousand_documents": ratio(1e3 * total, num_documents),
        "per_million_output_tokens": ratio(1e6 * total, output_tokens),
    }


def _sum_known(values: Sequence[float | None]) -> float | None:
    """Add values up; None if there are none or one is None."""
    known = _known(values)
    return sum(known) if known and len(known) == len(values) else None


def start_section(timed: TimedStart) -> Values:
    """Describe one start; what is not recorded is null."""
    start = timed.start
    names = ("run_id", "begin", "end", "exit_code", "versions", "git_commit")
    used = _known(worker.used_gib for worker in start.workers or ())
    return {
        **{name: getattr(start, name) for name in names},
        "last_sign": time_text(timed.end) if start.end is None and timed.end is not None else None,
        "seconds": timed.seconds,
        "documents": timed.documents,
        "documents_per_hour": None if timed.documents is None else ratio(HOUR_S * timed.documents, timed.seconds),
        "workers": None if start.workers is None else _worker_counts(start.workers),
        "memory_gib": {"planned": start.planned_gib, "used": max(used, default=None)},
        "worker_hours": timed.worker_hours,
        "paid_s": timed.paid,
    }


def _worker_counts(workers: Sequence[WorkerRecord]) -> dict[str, int]:
    ended = [worker for worker in workers if worker.reason not in (None, RELEASED)]
    return {
        "asked": len(workers),
        "ready": sum(worker.ready is not None for worker in workers),
        "died": sum(worker.ready is not None for worker in ended),
    }


def tail_section(starts: Sequence[TimedStart], figures: RunFigures) -> Values | None:
    """Describe the end of the last start with documents, if it came to their end; None if it is not recorded."""
    finished = [timed for timed in starts if timed.documents]
    if not finished or is_stopped(finished[-1].start):
        return None
    timed = finished[-1]
    run_id, ended = timed.start.run_id, "FROM work WHERE run_id = ? AND ended IS NOT NULL"
    [own] = figures.select(f"SELECT count(*) AS n, min(began) AS first, max(ended) AS last {ended}", run_id)
    if not own["n"]:
        return None
    last, num_last = own["last"], math.ceil(own["n"] / 100)
    before = figures.select(f"SELECT ended {ended} ORDER BY ended DESC LIMIT 1 OFFSET {num_last}", run_id)
    idle = np.array(sorted(_idle_seconds(timed, last)))
    long = idle[idle > IDLE_SHARE * (timed.seconds or math.inf)]
    return {
        "run_id": run_id,
        "documents": own["n"],
        "last_percent_documents": num_last,
        "last_percent_s": last - (before[0]["ended"] if before else own["first"]),
        "last_worker_alone_s": float(idle[1]) if len(idle) > 1 else 0.0,
        "workers": len(idle),
        "idle_workers": len(long),
        "idle_median_s": float(np.median(long)) if len(long) else 0.0,
    }


def _idle_seconds(timed: TimedStart, last: float) -> list[float]:
    """Return for each worker that was there at the end how long before the last document it had ended its own."""
    ends = {name: work.end for name, work in (timed.works or {}).items() if work.end is not None}
    for worker in timed.start.workers or ():
        if worker.name is None or worker.ready is None:
            continue
        if worker.gone is not None and worker.gone < last:
            ends.pop(worker.name, None)
        else:
            ends[worker.name] = max(worker.ready, ends.get(worker.name, worker.ready))
    return [max(0.0, last - end) for end in ends.values()]


def timeline_section(starts: Sequence[TimedStart], figures: RunFigures) -> list[Values]:
    """Return the time lines of the last starts; seconds are since a start's beginning."""
    lines = (_timeline(timed, figures) for timed in starts[-MOST_STARTS:] if timed.works is not None)
    return [line for line in lines if line is not None]


def _timeline(timed: TimedStart, figures: RunFigures) -> Values | None:
    begin, seconds = timed.begin, timed.seconds
    if begin is None or not seconds:
        return None
    listed = figures.stream(_TIMES, timed.start.run_id)
    spans = {worker: _spans(times, begin, seconds) for worker, times in groupby(listed, itemgetter("worker"))}
    works = timed.works or {}
    records = [asdict(worker) for worker in timed.start.workers or ()]
    recorded = {record["name"] for record in records}
    records += [{"worker": name, "name": name} for name in works if name not in recorded]  # their driver was killed
    lines = [_line(record, works.get(record["name"]), spans, begin) for record in records]
    lines.sort(key=lambda line: (line["seat"] is None, line["seat"] or 0, line["asked_s"] or 0.0))
    seats = list(dict.fromkeys(_place(line) for line in lines))
    shown = set(seats[:MOST_SEATS])
    ended = figures.select(_ENDED, begin, seconds, timed.start.run_id)
    return {
        "run_id": timed.start.run_id,
        "seconds": seconds,
        "exit_code": timed.start.exit_code,
        "ended": [part["documents"] for part in ended],
        "seats_left_out": len(seats) - len(shown),
        "workers": [line for line in lines if _place(line) in shown],
    }


def _place(line: ReadOnly) -> int | str:
    return line["worker"] if line["seat"] is None else line["seat"]


def _line(record: ReadOnly, work: Work | None, spans: Mapping[str, list[Any]], begin: float) -> Values:
    """Describe one worker. record: of WorkerRecord, or its name alone if only its rows know it."""
    times = {key: record.get(key) for key in ("asked", "begun", "ready", "gone")}
    return {
        **{key: record.get(key) for key in ("worker", "seat")},
        **{f"{key}_s": None if time is None else time - begin for key, time in times.items()},
        "reason": record.get("reason"),
        "documents": 0 if work is None else work.documents,
        "spans": spans.get(record["name"] or "", []) if work is not None else [],
    }


def _spans(times: Iterable[ReadOnly], begin: float, seconds: float) -> list[tuple[float, float, int]]:
    """Return (begin, end, documents) of the times at work; documents too short to be seen apart share a span."""
    least = seconds / RESOLUTION
    spans: list[tuple[float, float, int]] = []
    for time in times:
        since, until = time["began"] - begin, time["ended"] - begin
        if spans:
            first, last, count = spans[-1]
            if since < last or (since - last <= least and last - first < least):
                spans[-1] = (first, max(last, until), count + 1)
                continue
        spans.append((since, until, 1))
    return spans
