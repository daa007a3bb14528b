"""The dry run: what a start would do, which memory and time it would take, and with how many workers."""

import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from datetime import time as clock_time

import numpy as np

from specextend.cluster.backlog import Estimates
from specextend.cluster.checks import (
    Prepared,
    check_machine,
    check_retry,
    check_same_run,
    describe_selection,
    input_errors,
    open_rows,
    say_left_out,
)
from specextend.cluster.environment import is_local, say_room
from specextend.cluster.exits import RefusedError, reading
from specextend.cluster.forecast import Forecast, Outlook, Rates
from specextend.cluster.plan import Plan, make_plan, plan_memory, settle_batch_size
from specextend.cluster.progress import describe_duration
from specextend.core import Values, counted
from specextend.data.commits import Retry
from specextend.data.listing import describe_skipped

WIDTH = 80
"""Columns of a terminal, within which tables stay."""
_OVER_LENGTH = {"error": "error rows", "parts": "summarised in parts"}
"""What becomes of documents over the prompt limit; under all other policies they are cut."""
_MEMORY = {
    "target_weights": "weights of the target",
    "draft_weights": "weights of the draft",
    "target_cache": "cache of the target",
    "draft_caches": "caches of the draft",
    "activations": "a forward pass, about",
    "workspace": "the process and its libraries, about",
}

Calibrate = Callable[[Prepared, Estimates], Rates]


def dry_run(
    prepared: Prepared, *, retry_errors: Retry = "none", by: datetime | None = None, calibrate: Calibrate | None = None
) -> Values:
    """Plan a start and return what it would do as JSON values, without writing anything into the output folder.

    by: time at which the run must be done; the plan says with how many workers it is. calibrate: measures the pair's
    rates; without it nothing is loaded and the time is not known. Raises OtherRunError if the folder holds another run,
    OutputError, RefusedError and StoreError, and what `calibrate` raises.
    """
    with reading(prepared.output):
        check_retry(prepared, retry_errors, is_begun=check_same_run(prepared))
        progress, keys = open_rows(prepared, retry_errors)
    with input_errors():
        decoding = prepared.config.decoding
        plan = make_plan(prepared.source, prepared.prompts, keys, decoding.max_new_tokens, decoding.seed, lambda: None)
    config = settle_batch_size(prepared.config, prepared.facts, plan)
    prepared = replace(prepared, config=config)
    rates = None if calibrate is None else calibrate(prepared, plan.estimates)
    selection = prepared.source.selection
    return {
        "rows": prepared.source.num_rows,
        "selection": {
            "counts": {} if selection is None else dict(selection.counts),
            "notes": list(describe_selection(prepared.source)),
        },
        "rows_to_do": len(plan.estimates) + len(plan.refused),
        "error_rows_left_out": len(progress.final) if retry_errors == "retryable" else 0,
        "rows_rejected": dict(plan.rejected),
        "rows_over_length": plan.num_over_length,
        "audit": _checks(prepared, plan),
        "length_policy": config.prompt.length_policy,
        "prompt_tokens": plan.num_prompt_tokens(),
        "output_tokens_at_most": int(plan.estimates.max_new_tokens.sum(dtype=np.int64)),
        "prompt_lengths": plan.buckets(),
        **plan_memory(config, prepared.facts, plan),
        "this_machine": _say_of_machine(prepared),
        **_timing(prepared, plan, rates, by),
        "models": prepared.models,
        "fingerprint": prepared.manifest["fingerprint"],
    }


def parse_time(text: str, now: datetime) -> datetime:
    """Read `HH:MM`, which is the next time that a clock here shows it, or a time of ISO 8601. Raises ValueError.

    A time without a zone is in the zone of this machine's clock. now: with its zone.
    """
    here = now.astimezone().replace(tzinfo=None)
    try:
        if re.fullmatch(r"\d{1,2}:\d\d", text):
            found = datetime.combine(here, clock_time.fromisoformat(text.zfill(5)))
            found += timedelta(days=found <= here)
        else:
            found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"--by takes HH:MM or a time such as 2026-11-23T07:00, got {text!r}") from None
    found = found.astimezone()
    if found <= now:
        raise ValueError(f"--by {text} is past: it is {_say_time(now)}")
    return found


def describe_dry_run(plan: Values) -> str:
    """Describe the plan for people."""
    checks = [
        (each["check"], "not read" if each["rows"] is None else f"{each['rows']:,}", each["outcome"])
        for each in plan["audit"]
    ]
    lengths = [(name, f"{count:,}") for name, count in plan["prompt_lengths"].items()]
    rejected = sum(plan["rows_rejected"].values())
    prompt_tokens = counted(plan["prompt_tokens"], "prompt token")
    output_tokens = counted(plan["output_tokens_at_most"], "output token")
    lines = [
        *(line for note in plan["selection"]["notes"] for line in _wrap(note)),
        f"{plan['rows_to_do']:,} of {counted(plan['rows'], 'row')} to do, {rejected:,} of them rejected",
        *([say_left_out(plan["error_rows_left_out"])] if plan["error_rows_left_out"] else []),
        *_table(("input", "rows", "they are"), checks),
        f"about {prompt_tokens}, {output_tokens} at most",
        *_table(("prompt tokens", "rows"), lengths),
        *describe_memory(plan),
        *(_wrap(plan["this_machine"]) if plan["this_machine"] else []),
        *_describe_time(plan),
    ]
    return "\n".join(lines)


def _say_of_machine(prepared: Prepared) -> str | None:
    """Say why no run can start on this machine, which may only plan, or that it has room for few workers."""
    try:
        check_machine(prepared.config)
    except RefusedError as error:
        return f"here no run can start: {error}"
    return say_room(prepared.config.job) if is_local() else None


def _timing(prepared: Prepared, plan: Plan, rates: Rates | None, by: datetime | None) -> Values:
    """Return the parts of the plan that need rates; all None without."""
    if rates is None:
        return dict.fromkeys(("rates", "forecast", "documents_per_hour", "by", "cost"))
    config = prepared.config
    outlook = Outlook(plan.estimates, rates, config.decoding.batch_size)
    forecast = outlook.lasts(config.job.workers)
    seconds = {"likely": forecast.seconds, "low": forecast.seconds_high, "high": forecast.seconds_low}
    hourly = {name: 3600 * forecast.documents / each for name, each in seconds.items() if each}
    return {
        "rates": asdict(rates),
        "forecast": asdict(forecast),
        "documents_per_hour": hourly or None,
        "by": None if by is None else _by(outlook, by),
        "cost": _cost(forecast, config.report.price_per_worker_hour),
    }


def _cost(forecast: Forecast, price: float | None) -> dict[str, float] | None:
    """Return what the workers cost, each paid from the begin, loading included, to the end; None without a price."""
    if price is None:
        return None
    hours, low, high = (forecast.workers * seconds / 3600 for seconds in _span(forecast))
    return {"worker_hours": hours, "cost": price * hours, "cost_low": price * low, "cost_high": price * high}


def _by(outlook: Outlook, by: datetime) -> Values:
    """Return with how many workers the run is done at a time, if it starts now; None if with none."""
    left_s = by.timestamp() - time.time()
    return {
        "time": by.isoformat(timespec="minutes"),
        "workers": outlook.workers_within(left_s, surely=False),
        "workers_surely": outlook.workers_within(left_s, surely=True),
    }


def _checks(prepared: Prepared, plan: Plan) -> list[Values]:
    """List the checks of the rows to do: `check`, `rows` found (None: not checked) and the `outcome` for such rows."""
    policy, counts = prepared.config.prompt.length_policy, plan.rejected
    is_read = prepared.source.options.num_tokens_column is None
    text = {"null text": "NullText", "empty text": "EmptyText", "text not UTF-8": "UndecodableText"}
    found = [(check, counts[name] if is_read else None, "error rows") for check, name in text.items()]
    found += [
        ("max_new_tokens below 1", counts["BadMaxNewTokens"], "error rows"),
        ("no room for a document", counts["PromptTooLong"], "error rows"),
        ("over the prompt limit", plan.num_over_length, _OVER_LENGTH.get(policy, f"cut ({policy})")),
    ]
    if counts["BadId"]:
        found.append(("null or repeated id", counts["BadId"], "error rows"))
    if skipped := prepared.source.skipped:
        found.append(("files of another kind", None, f"skipped: {describe_skipped(skipped)}"))
    if repeated := prepared.source.num_repeated:
        found.append(("symbolic links to files that are read already", None, f"skipped: {repeated:,}"))
    return [{"check": check, "rows": rows, "outcome": outcome} for check, rows, outcome in found]


def describe_memory(plan: Values) -> list[str]:
    """Describe `memory_gib` and `cache` of a plan in lines."""
    sizes = plan["memory_gib"]
    rows = [(title, f"{sizes[name]:.3f}") for name, title in _MEMORY.items() if sizes[name] >= 0.0005]
    lines = _table(("memory of a worker", "GiB"), [*rows, ("together", f"{sum(sizes.values()):.3f}")])
    if cache := plan["cache"]:
        longest, mean = (cache[f"{name}_sequences_that_fit"] for name in ("longest", "mean"))
        size = f"the longest document takes {cache['longest_sequence_gib']:.3f} GiB of the target's cache"
        fit = f"{longest:,} fit at once, and {mean:,} as long as the mean"
        lines += _wrap(f"{size}: {fit}; decoding.max_batch_size is {cache['max_batch_size']}")
    return lines


def _describe_time(plan: Values) -> list[str]:
    if plan["forecast"] is None:
        return ["time and cost: not measured; --calibrate N measures them on N documents"]
    forecast = Forecast(**plan["forecast"])
    ends = [datetime.fromtimestamp(time.time() + seconds).astimezone() for seconds in _span(forecast)]
    rows = [
        ("time", *map(describe_duration, _span(forecast))),
        (f"end, in {ends[0]:%Z}, if it starts now", *(f"{end:%a %H:%M}" for end in ends)),
    ]
    if hourly := plan["documents_per_hour"]:
        rows.append(("documents an hour", *(f"{each:,.0f}" for each in hourly.values())))
    if cost := plan["cost"]:
        rows.append(("worker hours", f"{cost['worker_hours']:,.2f}", "", ""))
        rows.append(("cost", *(f"{cost[name]:,.2f}" for name in ("cost", "cost_low", "cost_high"))))
    head = (f"with {counted(forecast.workers, 'worker')}", "likely", "low", "high")
    return [*_table(head, rows, num_right=3), *_describe_by(plan["by"]), *_wrap(f"time: by {forecast.basis}")]


def _describe_by(by: Values | None) -> list[str]:
    if by is None:
        return []
    when = f"done by {_say_time(datetime.fromisoformat(by['time']))}"
    if by["workers"] is None:
        return _wrap(f"{when}: with no number of workers; what is left is too long for one document or its loading")
    surely = "no number is sure to" if by["workers_surely"] is None else f"{by['workers_surely']} to be sure"
    return [f"{when}: {counted(by['workers'], 'worker')} likely, {surely}"]


def _span(forecast: Forecast) -> tuple[float, float, float]:
    return forecast.seconds, forecast.seconds_low, forecast.seconds_high


def _say_time(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M %Z}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], num_right: int = 1) -> list[str]:
    """Lay out lines of columns; the `num_right` ones after the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    form = "  " + "  ".join(f"{{:{'>' if 1 <= i <= num_right else '<'}{width}}}" for i, width in enumerate(widths))
    return [form.format(*row).rstrip() for row in (head, *rows)]
