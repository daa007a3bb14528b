"""The work, memory and time of a start, and the workers it needs. Writes nothing.

`calibrate` decodes a sample and fits `Rates`. `Outlook` turns them into times with bounds. See
`docs/planning-and-report.md`.
"""

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from datetime import time as clock_time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from specextend.cluster.backlog import Estimates
from specextend.cluster.checks import (
    CheckedRun,
    check_machine,
    check_retry,
    describe_selection,
    input_errors,
    num_left_out,
    open_rows,
    say_left_out,
)
from specextend.cluster.environment import connected, is_local, say_room, settle_cores, start_worker
from specextend.cluster.exits import Interrupt, RefusedError, RunError, reading
from specextend.cluster.messages import Done, Outcome
from specextend.cluster.progress import describe_duration
from specextend.cluster.worker import EngineFactory, checked_engine
from specextend.cluster.workers import last_line
from specextend.cluster.workload import Plan, make_plan, plan_memory, settle_batch_size
from specextend.config import MAX_WORKERS, RunConfig
from specextend.core import DocumentKey, Values, counted
from specextend.data.listing import describe_skipped
from specextend.models.loading import load_engine
from specextend.models.pairing import guessed_layers
from specextend.report.sections import Section, number, thousandths, to_text
from specextend.stats import DecodingStats, ratio

MIN_DOCUMENTS = 2
"""A single document does not show how documents differ."""
DRIFT = 0.1
"""Relative error of any rate: machines drift this much from hour to hour."""
START_FACTOR = 1.5
"""Uncertainty factor of the loading time: files may be cached."""
MOST_UNCERTAIN = 20.0
"""No bound overflows a clock."""
TICK_S = 0.2
"""Seconds between checks of clocks and signals."""
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Two-sided 95% quantiles of Student's t, by degrees of freedom from 1."""
_NEEDS = f"--calibrate needs {counted(MIN_DOCUMENTS, 'decodable document')}"


class DocumentCost(NamedTuple):
    """Worker seconds of a document. Seconds of a batch are divided among its documents."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    prefill_s: float
    decode_s: float


def document_cost(stats: DecodingStats, max_new_tokens: int) -> DocumentCost:
    """Return the cost of a document as if its whole prompt had been read."""
    share_read = 1 - (ratio(stats.num_cached_tokens, stats.num_prompt_tokens) or 0.0)
    prefill_s = stats.prefill_s / share_read + stats.draft_prefill_s
    return DocumentCost(
        stats.num_prompt_tokens, stats.num_output_tokens, max_new_tokens, prefill_s, stats.step_s
    )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Costs on a worker with a full batch."""

    prefill: float
    """Seconds per prompt token."""
    decode: float
    """Seconds per output token."""
    output_share: float
    """Output tokens as a share of `max_new_tokens`."""
    spread: float
    """Standard deviation of a document's seconds, relative to the prediction."""
    num_documents: int
    start_s: float
    """Seconds from the start of Ray to loaded models."""
    device: str


def fit_rates(costs: Sequence[DocumentCost], *, start_s: float, device: str) -> Rates | None:
    """Fit rates to documents drawn by `draw_sample`; None for too few documents or no time.

    Documents are drawn by tokens, so mean rates hold even where cost grows with length.
    """
    told = [cost for cost in costs if cost.num_prompt_tokens and cost.num_output_tokens]
    if len(told) < MIN_DOCUMENTS or not all(cost.prefill_s + cost.decode_s > 0 for cost in told):
        return None
    prompts, outputs, allowed, prefill_s, decode_s = np.array(told, np.float64).T
    prefill = (prefill_s / prompts).mean()
    decode = (decode_s / outputs).mean()
    output_share = (outputs / allowed).mean()
    relative = (prefill_s + decode_s) / (prefill * prompts + decode * output_share * allowed) - 1
    return Rates(
        prefill=float(prefill),
        decode=float(decode),
        output_share=float(output_share),
        spread=math.sqrt((relative**2).sum() / (len(told) - 1)),
        num_documents=len(told),
        start_s=start_s,
        device=device,
    )


class Forecast(NamedTuple):
    """Seconds until the last document is done."""

    seconds: float
    seconds_low: float
    seconds_high: float
    """Bounds that hold in about 95 of 100 cases, on the measured type of machine."""
    documents: int
    workers: int
    basis: str


class Outlook:
    """Predicted time of the open documents."""

    def __init__(self, estimates: Estimates, rates: Rates, max_batch_size: int):
        self._rates, self._batch, self._num_documents = rates, max_batch_size, len(estimates)
        prefill_s = rates.prefill * estimates.num_prompt_tokens.astype(np.float64)
        decode_s = (
            rates.decode
            * rates.output_share
            * estimates.max_new_tokens
            * (estimates.num_prompt_tokens > 0)
        )
        seconds = prefill_s + decode_s
        self._busy_s = float(seconds.sum())
        """A single worker's, without loading."""
        self._longest_s = float(seconds.max(initial=0.0))
        self._last_s = float((prefill_s + max_batch_size * decode_s).max(initial=0.0))
        """The longest document's, at the speed of a full batch."""
        squares = float((seconds**2).sum()) / self._busy_s**2 if self._busy_s else 0.0
        deviation = rates.spread * math.sqrt(1 / rates.num_documents + squares)
        exponent = math.hypot(
            DRIFT, _T_95[min(rates.num_documents - 1, len(_T_95)) - 1] * deviation
        )
        self._factor = math.exp(min(exponent, math.log(MOST_UNCERTAIN)))

    def lasts(self, workers: int) -> Forecast:
        """Predict the time for `workers`, loading included.

        At best, work is divided evenly, or the longest document decides; a schedule without idle
        slots exceeds the even share by at most this document.
        """
        workers = max(1, min(workers, self._num_documents))
        even_s = self._busy_s / workers
        low = max(even_s, self._longest_s)
        high = max(low, even_s + (1 - 1 / (workers * self._batch)) * self._last_s)
        start_s = self._rates.start_s if self._busy_s else 0.0
        return Forecast(
            seconds=start_s + math.sqrt(low * high),
            seconds_low=start_s / START_FACTOR + low / self._factor,
            seconds_high=start_s * START_FACTOR + high * self._factor,
            documents=self._num_documents,
            workers=workers,
            basis=f"a calibration of {counted(self._rates.num_documents, 'document')} on "
            f"{self._rates.device}",
        )

    def workers_within(self, limit_s: float, *, surely: bool) -> int | None:
        """Return the fewest workers for `limit_s`, by the upper bound if `surely`."""
        for workers in range(1, max(1, min(self._num_documents, MAX_WORKERS)) + 1):
            forecast = self.lasts(workers)
            if (forecast.seconds_high if surely else forecast.seconds) <= limit_s:
                return workers
        return None


def draw_sample(estimates: Estimates, size: int, seed: int) -> list[DocumentKey]:
    """Draw up to `size` documents with probabilities proportional to tokens; longest first.

    This represents rare long documents by their share of the time.
    """
    positions = np.flatnonzero(estimates.num_prompt_tokens)
    if len(positions) > size:
        totals = estimates.totals(positions)
        positions = np.random.default_rng(seed).choice(
            positions, size, replace=False, p=totals / totals.sum()
        )
    order = np.argsort(-estimates.totals(positions), kind="stable")
    return [estimates.key(int(position)) for position in positions[order]]


def calibrate(
    checked: CheckedRun,
    estimates: Estimates,
    num_documents: int,
    interrupt: Interrupt,
    say: Callable[[str], None],
    factory: EngineFactory = load_engine,
) -> Rates:
    """Decode a sample on a worker and return its rates.

    Raises:
        RefusedError: There are too few documents, or no worker can run here.
        RunError: There is no Ray, or the worker failed.
    """
    check_machine(checked.config)
    config = checked.config
    decoding = config.decoding
    sample = draw_sample(estimates, num_documents, decoding.seed)
    if len(sample) < MIN_DOCUMENTS:
        raise RefusedError(f"{_NEEDS}, but got {len(sample)}")
    begin = time.monotonic()
    make = partial(checked_engine, factory=factory, hashes=checked.hashes)
    wait = partial(_first_answer, interrupt=interrupt, limit_s=config.job.silence_s)

    def decode(config: RunConfig) -> tuple[dict[DocumentKey, Outcome], float, str]:
        actor = start_worker(config.job)
        try:
            _, info = wait([actor.ready.remote(config, checked.source, make)])
            start_s = time.monotonic() - begin
            documents = counted(len(sample), "document")
            say(f"calibrating with {documents} on {info.device}, models loaded at {start_s:.1f} s")
            return _decode(actor, sample, decoding.batch_size, wait), start_s, info.device
        finally:
            ray.kill(actor)

    with connected(interrupt):
        config = settle_cores(config)
        outcomes, start_s, device = decode(config)
        draft = config.active_draft
        if readings := guessed_layers(draft, checked.facts.num_layers):
            assert draft is not None
            other = replace(draft, feature_layers=readings[1])
            try:
                again, _, _ = decode(config.model_copy(update={"draft": other}))
            except RunError as error:
                say(f"the layers {[*readings[1]]} are not compared: {error}")
            else:
                say(_compare_readings(readings, [outcomes, again]))
    costs = [
        document_cost(outcome.stats, estimates[key].max_new_tokens)
        for key, outcome in outcomes.items()
        if isinstance(outcome, Done)
    ]
    rates = fit_rates(costs, start_s=start_s, device=device)
    if rates is None:
        failed = [str(each) for each in outcomes.values() if not isinstance(each, Done)]
        raise RefusedError(f"{_NEEDS}: {'; '.join(failed) or 'their outputs are empty'}")
    return rates


def _compare_readings(
    readings: list[tuple[int, ...]], decoded: list[dict[DocumentKey, Outcome]]
) -> str:
    """Say which layers of the target predict more first tokens of a head's drafts."""
    rates = []
    for outcomes in decoded:
        stats = [each.stats for each in outcomes.values() if isinstance(each, Done)]
        num_steps = sum(each.num_network_steps for each in stats)
        if num_steps == 0:
            return "the head drafted no token, so its layers are not compared"
        rates.append(round(sum(each.num_first_accepted for each in stats) / num_steps, 2))
    chosen, other = readings
    advice = f"set draft.feature_layers: {[*other]}" if rates[1] > rates[0] else "keep them"
    return (
        f"the head's first tokens were accepted at {rates[0]:.2f} with the target's layers "
        f"{[*chosen]}, and at {rates[1]:.2f} with {[*other]}: {advice}"
    )


def _decode(
    actor: Any,
    sample: Sequence[DocumentKey],
    size: int,
    wait: Callable[[list[Any]], tuple[Any, Any]],
) -> dict[DocumentKey, Outcome]:
    """Decode the last document to warm up, then the sample in full batches of `size`.

    A short document fills the last batch, because rates of partial batches would not apply.
    """
    numbers, waiting, outcomes = itertools.count(), list(sample), dict[DocumentKey, Outcome]()

    def hand_out(key: DocumentKey) -> Any:
        return actor.run.remote(f"calibration-{next(numbers)}", key, 1)

    wait([hand_out(sample[-1])])
    running: dict[Any, DocumentKey | None] = {}
    """Calls in progress; None for a filler."""
    while len(outcomes) < len(sample):
        while len(running) < size:
            key = waiting.pop(0) if waiting else None
            running[hand_out(sample[-1] if key is None else key)] = key
        call, outcome = wait(list(running))
        if (key := running.pop(call)) is not None:
            outcomes[key] = outcome
    return outcomes


def _first_answer(calls: list[Any], interrupt: Interrupt, limit_s: float) -> tuple[Any, Any]:
    give_up_at = time.monotonic() + limit_s
    done: list[Any] = []
    while not done:
        interrupt.check()
        if time.monotonic() >= give_up_at:
            raise RunError(f"the worker of the calibration has not answered for {limit_s:.0f} s")
        done, _ = ray.wait(calls, timeout=TICK_S)
    try:
        return done[0], ray.get(done[0])
    except RayError as error:
        raise RunError(f"the worker of the calibration failed: {last_line(error)}") from error


WIDTH = 80
_OVER_LENGTH = {"error": "error rows", "parts": "summarised in parts"}
_REJECTED = {
    "null text": "NullText",
    "empty text": "EmptyText",
    "text not UTF-8": "UndecodableText",
    "max_new_tokens below 1": "BadMaxNewTokens",
    "no room for a document": "PromptTooLong",
}
_MEMORY = {
    "target_weights": "weights of the target",
    "draft_weights": "weights of the draft",
    "target_cache": "cache of the target",
    "draft_caches": "caches of the draft",
    "activations": "a forward pass, about",
    "workspace": "the process and its libraries, about",
}

Calibrate = Callable[[CheckedRun, Estimates], Rates]


def dry_run(
    checked: CheckedRun,
    *,
    by: datetime | None = None,
    calibrate: Calibrate | None = None,
) -> Values:
    """Plan a start, as JSON values.

    Args:
        by: Deadline; the plan then says how many workers it takes.
        calibrate: Measures the rates; without it there is no forecast.

    Raises:
        OtherRunError: The folder holds another run.
        RunError: Files cannot be read, or the calibration failed.
    """
    with reading(checked.output):
        check_retry(checked)
        progress, keys = open_rows(checked)
    with input_errors():
        plan = make_plan(checked.source, checked.tasks, keys)
    config = settle_batch_size(checked.config, checked.facts, plan)
    checked = replace(checked, config=config)
    rates = None if calibrate is None else calibrate(checked, plan.estimates)
    selection = checked.source.selection
    return {
        "rows": checked.source.num_rows,
        "selection": {
            "counts": {} if selection is None else dict(selection.counts),
            "notes": [*describe_selection(checked.source), *checked.notes],
        },
        "rows_to_do": len(plan.estimates) + len(plan.refused),
        "error_rows_left_out": num_left_out(checked, progress),
        "rows_rejected": dict(plan.rejected),
        "rows_over_length": plan.num_over_length,
        "cut": {"rows": plan.num_cut, "unread": plan.unread, "says": plan.says_cut()},
        "audit": _checks(checked, plan),
        "length_policy": config.prompt.length_policy,
        "prompt_tokens": plan.num_prompt_tokens(),
        "output_tokens_at_most": int(plan.estimates.max_new_tokens.sum(dtype=np.int64)),
        "prompt_lengths": plan.buckets(),
        **plan_memory(config, checked.facts, plan),
        "this_machine": _say_of_machine(checked),
        **_timing(checked, plan, rates, by),
        "models": checked.models,
        "fingerprint": checked.manifest["fingerprint"],
    }


def parse_time(text: str, now: datetime) -> datetime:
    """Parse `HH:MM` (the next such time) or an ISO 8601 time, by default in the local zone.

    Raises RefusedError for a malformed or past time.
    """
    here = now.astimezone().replace(tzinfo=None)
    try:
        if re.fullmatch(r"\d{1,2}:\d\d", text):
            found = datetime.combine(here, clock_time.fromisoformat(text.zfill(5)))
            found += timedelta(days=found <= here)
        else:
            found = datetime.fromisoformat(text)
    except ValueError:
        raise RefusedError(
            f"--by takes HH:MM or a time such as 2026-11-23T07:00, got {text!r}"
        ) from None
    found = found.astimezone()
    if found <= now:
        raise RefusedError(f"--by {text} is past: it is {_say_time(now)}")
    return found


def describe_dry_run(plan: Values) -> str:
    """Format a plan for people."""
    checks = [
        (
            each["check"],
            "not read" if each["rows"] is None else number(each["rows"]),
            each["outcome"],
        )
        for each in plan["audit"]
    ]
    lengths = [(name, number(count)) for name, count in plan["prompt_lengths"].items()]
    rejected = sum(plan["rows_rejected"].values())
    prompt_tokens = counted(plan["prompt_tokens"], "prompt token")
    output_tokens = counted(plan["output_tokens_at_most"], "output token")
    parts: list[Section | str] = [
        *plan["selection"]["notes"],
        f"{plan['rows_to_do']:,} of {counted(plan['rows'], 'row')} to do, {rejected:,} of them "
        "rejected",
        *say_left_out(plan["error_rows_left_out"]),
        Section("", ("input", "rows", "they are"), checks, ("they are",)),
        *plan["cut"]["says"],
        f"about {prompt_tokens}, {output_tokens} at most",
        Section("", ("prompt tokens", "rows"), lengths),
        *describe_memory(plan),
        *([plan["this_machine"]] if plan["this_machine"] else []),
        *_describe_time(plan),
    ]
    return to_text(parts, WIDTH)


def _say_of_machine(checked: CheckedRun) -> str | None:
    try:
        check_machine(checked.config)
    except RefusedError as error:
        return f"here no run can start: {error}"
    return say_room(checked.config.job) if is_local() else None


def _timing(checked: CheckedRun, plan: Plan, rates: Rates | None, by: datetime | None) -> Values:
    if rates is None:
        return dict.fromkeys(("rates", "forecast", "documents_per_hour", "by", "cost"))
    config = checked.config
    outlook = Outlook(plan.estimates, rates, config.decoding.batch_size)
    forecast = outlook.lasts(config.job.workers)
    seconds = {
        "likely": forecast.seconds,
        "low": forecast.seconds_high,
        "high": forecast.seconds_low,
    }
    hourly = {name: 3600 * forecast.documents / each for name, each in seconds.items() if each}
    return {
        "rates": asdict(rates),
        "forecast": forecast._asdict(),
        "documents_per_hour": hourly or None,
        "by": None if by is None else _by(outlook, by),
        "cost": _cost(forecast, config.report.price_per_worker_hour),
    }


def _cost(forecast: Forecast, price: float | None) -> dict[str, float] | None:
    if price is None:
        return None
    hours, low, high = (forecast.workers * seconds / 3600 for seconds in _span(forecast))
    return {
        "worker_hours": hours,
        "cost": price * hours,
        "cost_low": price * low,
        "cost_high": price * high,
    }


def _by(outlook: Outlook, by: datetime) -> Values:
    left_s = by.timestamp() - time.time()
    return {
        "time": by.isoformat(timespec="minutes"),
        "workers": outlook.workers_within(left_s, surely=False),
        "workers_surely": outlook.workers_within(left_s, surely=True),
    }


def _checks(checked: CheckedRun, plan: Plan) -> list[Values]:
    policies = [task.config.prompt.length_policy for task in checked.tasks]
    policy = "error" if "error" in policies else policies[0]
    counts = plan.rejected
    over = _OVER_LENGTH.get(policy, f"cut ({policy})")
    found: list[tuple[str, int | None, str]] = [
        *((check, counts[name], "error rows") for check, name in _REJECTED.items()),
        ("over the prompt limit", plan.num_over_length, over),
    ]
    if bad_pages := counts["BadPages"]:
        found.append(("pages that do not fit the text", bad_pages, "error rows"))
    if skipped := checked.source.skipped:
        found.append(("files of another kind", None, f"skipped: {describe_skipped(skipped)}"))
    if repeated := checked.source.num_repeated:
        found.append(("symbolic links to files already read", None, f"skipped: {repeated:,}"))
    return [{"check": check, "rows": rows, "outcome": outcome} for check, rows, outcome in found]


def describe_memory(plan: Values) -> list[Section | str]:
    """Format the memory parts of a plan."""
    sizes = plan["memory_gib"]
    named = {title: sizes[name] for name, title in _MEMORY.items() if sizes[name] >= 0.0005}
    named["together"] = sum(sizes.values())
    rows = [(title, thousandths(size)) for title, size in named.items()]
    parts: list[Section | str] = [Section("", ("memory of a worker", "GiB"), rows)]
    if cache := plan["cache"]:
        longest, mean = (cache[f"{name}_sequences_that_fit"] for name in ("longest", "mean"))
        parts.append(
            f"the longest document takes {cache['longest_sequence_gib']:.3f} GiB of the target's "
            f"cache: {longest:,} fit at once, and {mean:,} as long as the mean; "
            f"decoding.max_batch_size is {cache['max_batch_size']}"
        )
    return parts


def _describe_time(plan: Values) -> list[Section | str]:
    if plan["forecast"] is None:
        return ["time and cost: not measured; --calibrate N measures them on N documents"]
    forecast = Forecast(**plan["forecast"])
    span = _span(forecast)
    ends = [datetime.fromtimestamp(time.time() + seconds).astimezone() for seconds in span]
    rows = [
        ("time", *map(describe_duration, span)),
        (f"end, in {ends[0]:%Z}, if it starts now", *(f"{end:%a %H:%M}" for end in ends)),
    ]
    if hourly := plan["documents_per_hour"]:
        rows.append(("documents an hour", *(f"{each:,.0f}" for each in hourly.values())))
    if cost := plan["cost"]:
        rows.append(("worker hours", f"{cost['worker_hours']:,.2f}", "", ""))
        rows.append(("cost", *(f"{cost[name]:,.2f}" for name in ("cost", "cost_low", "cost_high"))))
    head = (f"with {counted(forecast.workers, 'worker')}", "likely", "low", "high")
    return [Section("", head, rows), *_describe_by(plan["by"]), f"time: by {forecast.basis}"]


def _describe_by(by: Values | None) -> list[str]:
    if by is None:
        return []
    when = f"done by {_say_time(datetime.fromisoformat(by['time']))}"
    if by["workers"] is None:
        return [
            f"{when}: impossible with any number of workers, because loading or a single document "
            "takes longer"
        ]
    surely = (
        "no number is sure to"
        if by["workers_surely"] is None
        else f"{by['workers_surely']} to be sure"
    )
    return [f"{when}: {counted(by['workers'], 'worker')} likely, {surely}"]


def _span(forecast: Forecast) -> tuple[float, float, float]:
    return forecast.seconds, forecast.seconds_low, forecast.seconds_high


def _say_time(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M %Z}"
