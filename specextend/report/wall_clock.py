"""The wall clock of a run: starts, workers, end and cost. Begin at `clock_sections`.

A worker is paid from its process to its release. docs/planning-and-report.md explains the kinds of
that time.
"""

from collections.abc import Sequence
from operator import attrgetter

from specextend.core import ReadOnly, Values
from specextend.data.run_folder import RELEASED, Heartbeat, Start, parse_time, time_text
from specextend.report.charts import RunFigures

FINISHED = (0, 3)
"""Exit codes of a start without open documents."""
RESOLUTION = 400
"""Parts of a start. Documents that begin in the same part are drawn as one span."""
MOST_STARTS = 6
MOST_SEATS = 64
"""Starts and seats of the time line."""
IDLE_SHARE = 0.05
"""Share of a start that counts as idle."""
_STARTS = (
    "place INT, run_id TEXT, began DOUBLE, ended DOUBLE, sign DOUBLE, has_end BOOL, is_stopped "
    "BOOL, has_workers BOOL, gpus DOUBLE, price DOUBLE"
)
"""Starts in order, with their last sign of life."""
_WORKERS = (
    "place INT, number INT, has_died BOOL, worker TEXT, seat BIGINT, asked DOUBLE, begun DOUBLE, "
    "ready DOUBLE, gone DOUBLE, reason TEXT, name TEXT, used_gib DOUBLE"
)
_RECORDED = attrgetter(
    "worker", "seat", "asked", "begun", "ready", "gone", "reason", "name", "used_gib"
)
"""Workers in order. A worker that was never ready has no name."""
_WORKS = """
    SELECT run_id, worker AS name, count(*) AS documents, max(ended) AS last,
        coalesce(sum(prefill_s), 0) + coalesce(sum(draft_prefill_s), 0) AS prefill,
        coalesce(sum(draft_s), 0) + coalesce(sum(verify_s), 0) + coalesce(sum(retrieval_s),
            0) AS decode,
        coalesce(sum(other_s), 0) AS other
    FROM work GROUP BY ALL
"""
"""Finished documents by start and worker."""
_TIMED = """
    SELECT starts.* REPLACE (coalesce(ended, greatest(sign, last)) AS ended),
    sums.* EXCLUDE (run_id, last, documents),
        if(EXISTS (SELECT 1 FROM works WHERE run_id IS NULL), NULL,
            coalesce(sums.documents, 0)) AS documents
    FROM starts LEFT JOIN (
        SELECT run_id, max(last) AS last, sum(documents)::BIGINT AS documents,
            sum(prefill) AS prefill, sum(decode) AS decode, sum(other) AS other
        FROM works GROUP BY run_id
    ) AS sums USING (run_id)
"""
"""Starts with their work, up to the end or the last sign of life."""
_HELD = """
    SELECT workers.*, timed.ended, workers.name IS NOT NULL AND ready IS NOT NULL AS was_ready,
        if(was_ready, greatest(ready, coalesce(gone, timed.ended)) - ready, 0) AS there,
        greatest(0, there - coalesce(works.prefill + works.decode + works.other, 0)) AS idle,
        if(
            (is_stopped OR has_died) AND (last IS NOT NULL OR works.documents IS NULL),
            least(idle, greatest(0, there - greatest(0, coalesce(last, ready) - ready))),
            0
        ) AS lost
    FROM workers JOIN timed USING (place)
    LEFT JOIN works ON works.run_id = timed.run_id AND works.name = workers.name
"""
"""Workers with their ready and idle time."""
_SEATS = """
    SELECT place, greatest(min(begun), arg_max(coalesce(gone, ended),
        (asked, number))) - min(begun) AS paid,
        greatest(0, least(paid, min(ready) FILTER (was_ready) - min(begun))) AS loading,
        greatest(0, paid - sum(there) - loading) AS dead, sum(idle - lost) AS waiting,
        sum(lost) AS lost
    FROM held GROUP BY place, seat HAVING min(begun) IS NOT NULL
"""
"""Paid time without a document by seat."""
_PAID = """
    SELECT place, run_id, gpus, price, has_end, began, ended, is_stopped, documents,
        if(ended < began, 0, ended - began) AS seconds,
        3600 * documents / nullif(seconds, 0) AS documents_per_hour,
        if(
            has_workers,
            {'asked': coalesce(asked, 0), 'ready': coalesce(ready, 0), 'died': coalesce(died, 0)},
            NULL
        ) AS workers,
        used_gib,
        if(
            documents IS NOT NULL AND has_workers AND ended IS NOT NULL,
            {
                'prefill': coalesce(prefill, 0), 'decode': coalesce(decode, 0),
                'other': coalesce(other, 0),
                'waiting': coalesce(waiting, 0), 'lost': coalesce(lost, 0),
                'loading': coalesce(loading, 0),
                'dead': coalesce(dead, 0)
            },
            NULL
        ) AS paid_s,
        (
            paid_s['prefill'] + paid_s['decode'] + paid_s['other'] + paid_s['waiting']
            + paid_s['lost'] + paid_s['loading'] + paid_s['dead']
        ) / 3600 AS worker_hours,
        worker_hours * gpus AS gpu_hours
    FROM timed
    LEFT JOIN (
        SELECT place, sum(waiting) AS waiting, sum(lost) AS lost, sum(loading) AS loading,
        sum(dead) AS dead
        FROM seats GROUP BY place
    ) USING (place)
    LEFT JOIN (
        SELECT place, count(*) AS asked, count(ready) AS ready, count(ready)
            FILTER (has_died) AS died,
            max(used_gib) AS used_gib
        FROM workers GROUP BY place
    ) USING (place)
    ORDER BY place
"""
"""Starts with paid worker-seconds by kind, null without a record."""
_TABLES = {"works": _WORKS, "timed": _TIMED, "held": _HELD, "seats": _SEATS, "paid": _PAID}
_WALL_CLOCK = """
    WITH sums AS (
        SELECT coalesce(bool_and(has_end), false) AS is_exact, arg_max(price, place) AS price,
            if(count(seconds) = count(*), sum(seconds), NULL) AS seconds,
            if(count(worker_hours) = count(*), sum(worker_hours), NULL) AS worker_hours,
            if(count(gpu_hours) = count(*), sum(gpu_hours), NULL) AS gpu_hours,
            if(
                count(worker_hours) = count(*) AND count(*) > 0,
                {
                    'prefill': sum(paid_s.prefill), 'decode': sum(paid_s.decode),
                    'other': sum(paid_s.other),
                    'waiting': sum(paid_s.waiting), 'lost': sum(paid_s.lost),
                    'loading': sum(paid_s.loading),
                    'dead': sum(paid_s.dead)
                },
                NULL
            ) AS paid_s
        FROM paid
    ), documents AS (
        SELECT count(*) AS n, sum(num_prompt_tokens) AS prompt,
        sum(num_output_tokens) AS output FROM done
    )
    SELECT seconds, is_exact, 3600 * n / nullif(seconds, 0) AS documents_per_hour,
        coalesce(prompt, 0) / nullif(seconds, 0) AS prompt_tokens_per_s,
        coalesce(output, 0) / nullif(seconds, 0) AS output_tokens_per_s,
        worker_hours, gpu_hours, paid_s,
        if(
            worker_hours > 0,
            {
                'prefill': paid_s.prefill / worker_hours / 3600,
                'decode': paid_s.decode / worker_hours / 3600,
                'other': paid_s.other / worker_hours / 3600,
                'waiting': paid_s.waiting / worker_hours / 3600,
                'lost': paid_s.lost / worker_hours / 3600,
                'loading': paid_s.loading / worker_hours / 3600,
                'dead': paid_s.dead / worker_hours / 3600
            },
            NULL
        ) AS shares,
        if(
            price * worker_hours IS NOT NULL,
            {
                'price_per_worker_hour': price, 'total': price * worker_hours,
                'per_thousand_documents': 1e3 * price * worker_hours / nullif(n, 0),
                'per_million_output_tokens': 1e6 * price * worker_hours / nullif(output, 0)
            },
            NULL
        ) AS cost
    FROM sums, documents
"""
"""Rates, hours, shares of the paid time and cost of the whole job."""
_TAIL = f"""
    WITH start AS (
        SELECT place, run_id, nullif(seconds, 0) AS seconds, is_stopped
        FROM paid WHERE documents > 0 ORDER BY place DESC LIMIT 1
    ), own AS (
        SELECT began, ended, row_number() OVER (ORDER BY ended DESC) AS number
        FROM work JOIN start USING (run_id) WHERE ended IS NOT NULL AND NOT is_stopped
    ), whole AS (
        SELECT count(*) AS documents, (count(*) + 99) // 100 AS last_percent, min(began) AS first,
        max(ended) AS last
        FROM own
    ), idle AS (
        SELECT greatest(0, whole.last - greatest(ready, works.last)) AS idle,
        idle > {IDLE_SHARE} * seconds AS is_long
        FROM (SELECT name, last FROM works JOIN start USING (run_id)) AS works
        FULL JOIN (SELECT name, ready, gone FROM held JOIN start USING (place)
            WHERE was_ready) USING (name)
        CROSS JOIN whole CROSS JOIN start
        WHERE coalesce(ready, works.last) IS NOT NULL AND coalesce(gone, whole.last) >= whole.last
    ), waits AS (
        SELECT coalesce(min(idle, 2)[2], 0) AS last_worker_alone_s, count(*) AS workers,
            count(*) FILTER (is_long) AS idle_workers,
            coalesce(median(idle) FILTER (is_long), 0) AS idle_median_s
        FROM idle
    )
    SELECT run_id, documents, last_percent AS last_percent_documents,
        last - coalesce((SELECT ended FROM own WHERE number = last_percent + 1),
            first) AS last_percent_s, waits.*
    FROM start, whole, waits WHERE documents > 0
"""
"""End of the last start with documents: its last 1%, and idle time of its workers."""
_LINES = """
    WITH stretches AS (
        SELECT worker AS name, min(began) - $3 AS since, max(ended) - $3 AS until,
            count(*) AS documents
        FROM work WHERE run_id = $2 AND ended IS NOT NULL
        GROUP BY worker, floor((began - $3) / $4)
    ), at_work AS (
        SELECT name, list(row(since, until, documents) ORDER BY since) AS spans
        FROM stretches GROUP BY name
    )
    SELECT coalesce(worker, name) AS worker, seat, asked - $3 AS asked_s,
        begun - $3 AS begun_s, ready - $3 AS ready_s, gone - $3 AS gone_s, reason,
        coalesce(documents, 0) AS documents, coalesce(spans, []) AS spans,
        dense_rank() OVER (ORDER BY seat NULLS LAST, if(seat IS NULL, name, '')) AS place
    FROM (FROM workers WHERE place = $1) AS workers
    FULL JOIN (FROM works WHERE run_id = $2) AS works USING (name)
    LEFT JOIN at_work USING (name)
    ORDER BY seat NULLS LAST, asked, number, name
"""
"""Workers of a start by its record or, if it was killed, by its rows."""
PARTS = 40
"""Parts of a start in which finished documents are counted."""
_ENDED = f"""
    SELECT count(ended) AS documents FROM range({PARTS}) AS parts (part) LEFT JOIN (
        SELECT ended, least({PARTS - 1}, floor((ended - ?) / ? * {PARTS}))::BIGINT AS part
        FROM work WHERE run_id = ? AND ended IS NOT NULL
    ) USING (part) GROUP BY part ORDER BY part
"""


def clock_sections(
    starts: Sequence[Start], figures: RunFigures, heartbeat: Heartbeat | None
) -> Values:
    """Compute the sections `wall_clock`, `starts`, `tail` and `timeline` of a report."""
    _collect(starts, figures, heartbeat)
    [wall_clock] = figures.select(_WALL_CLOCK)
    paid = figures.select("FROM paid ORDER BY place")
    lines = (
        _timeline(each, start.exit_code, figures)
        for start, each in list(zip(starts, paid, strict=True))[-MOST_STARTS:]
        if each["documents"] is not None
    )
    return {
        "wall_clock": wall_clock,
        "starts": [*map(_start, starts, paid)],
        "tail": next(iter(figures.select(_TAIL)), None),
        "timeline": [line for line in lines if line is not None],
    }


def _collect(starts: Sequence[Start], figures: RunFigures, heartbeat: Heartbeat | None) -> None:
    beats = [*(start.took_over for start in starts), heartbeat]
    signs = [(beat.run_id, beat.heartbeat) for beat in beats if beat is not None]
    signs += [(start.run_id, start.seen) for start in starts if start.seen is not None]
    of_starts = [
        (
            place,
            start.run_id,
            parse_time(start.begin),
            parse_time(start.end),
            max((at for run_id, at in signs if run_id == start.run_id), default=None),
            start.end is not None,
            start.exit_code not in FINISHED,
            start.workers is not None,
            start.gpus_per_worker,
            start.price_per_worker_hour,
        )
        for place, start in enumerate(starts)
    ]
    of_workers = [
        (place, number, worker.reason not in (None, RELEASED), *_RECORDED(worker))
        for place, start in enumerate(starts)
        for number, worker in enumerate(start.workers or ())
    ]
    figures.create("starts", _STARTS, of_starts)
    figures.create("workers", _WORKERS, of_workers)
    for name, query in _TABLES.items():
        figures.select(f"CREATE OR REPLACE TABLE {name} AS {query}")


def _start(start: Start, paid: ReadOnly) -> Values:
    of_record = ("run_id", "begin", "end", "exit_code", "versions", "git_commit")
    of_rows = ("seconds", "documents", "documents_per_hour", "workers", "worker_hours", "paid_s")
    return {
        **{name: getattr(start, name) for name in of_record},
        **{name: paid[name] for name in of_rows},
        "last_sign": time_text(paid["ended"])
        if start.end is None and paid["ended"] is not None
        else None,
        "memory_gib": {"planned": start.planned_gib, "used": paid["used_gib"]},
    }


def _timeline(start: ReadOnly, exit_code: int | None, figures: RunFigures) -> Values | None:
    """Return the time line of a start; None for an empty start."""
    run_id = start["run_id"]
    begin = start["began"]
    seconds = start["seconds"]
    if begin is None or not seconds:
        return None
    lines = figures.select(_LINES, start["place"], run_id, begin, seconds / RESOLUTION)
    places = [line.pop("place") for line in lines]
    ended = figures.select(_ENDED, begin, seconds, run_id)
    return {
        "run_id": run_id,
        "seconds": seconds,
        "exit_code": exit_code,
        "ended": [part["documents"] for part in ended],
        "seats_left_out": max(0, max(places, default=0) - MOST_SEATS),
        "workers": [line for line, place in zip(lines, places, strict=True) if place <= MOST_SEATS],
    }
