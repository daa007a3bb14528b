"""Forecasts: a worker decodes some documents, and what they took says how long all of them will take.

`calibrate` decodes a sample on the Ray that the run would use and fits `Rates`: seconds per prompt token, seconds per
output token, and how much documents differ. `Outlook` makes of them the time of a number of workers, with bounds.
`docs/planning-and-report.md` describes the method. Nothing is written, and nothing is kept for a later start.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import numpy as np

from specextend.cluster.environment import connected, settle_cores
from specextend.cluster.estimates import Estimates, TokenEstimate
from specextend.cluster.exits import Interrupt, RefusedError, WorkersFailError
from specextend.cluster.leases import Lease
from specextend.cluster.messages import CallLost, Died, Done, Event, Polled, Ready, Returned, StartFailed
from specextend.cluster.prepare import Prepared, check_machine
from specextend.cluster.progress import StallGuard
from specextend.cluster.worker import CheckedFactory, EngineFactory
from specextend.cluster.workers import Pool
from specextend.config import MAX_WORKERS
from specextend.core import DocumentKey, counted
from specextend.loading import load_engine
from specextend.stats import ratio

MIN_DOCUMENTS = 2
"""Fewest documents that rates can be fitted to: one says nothing about how documents differ."""
DRIFT = 0.1
"""Relative error of any rate, however many documents it comes from: the same machine differs by that from hour to hour
(`docs/log.md`)."""
START_FACTOR = 1.5
"""Factor by which loading may take longer or shorter: a single start was measured, with files cached or not."""
MOST_UNCERTAIN = 20.0
"""Largest factor of an interval: rates that are known no better say nothing, but must not overflow a clock."""
TICK_S = 0.2
"""Seconds to wait for an event before clock and signals are checked again."""
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 95%, two-sided, by degrees of freedom from 1 on; the last one stands for all above."""
_WORKER = "worker-1"
_NEEDS = f"--calibrate needs {counted(MIN_DOCUMENTS, 'document')} that can be decoded"


@dataclass(frozen=True, slots=True)
class DocumentCost:
    """The seconds of its worker that a decoded document took; those that a batch shares are divided among it."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, done: Done, max_new_tokens: int) -> DocumentCost:
        """Take the cost from a document's result, as if nothing of its prompt had been read for another one."""
        stats = done.stats
        share_read = 1 - (ratio(stats.num_cached_tokens, stats.num_prompt_tokens) or 0.0)
        prefill_s = stats.prefill_s / share_read + stats.draft_prefill_s
        return cls(stats.num_prompt_tokens, stats.num_output_tokens, max_new_tokens, prefill_s, stats.step_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Cost of documents on a worker whose batch is full."""

    prefill: float
    """Seconds for a prompt token."""
    decode: float
    """Seconds for an output token."""
    output_share: float
    """Output tokens for each one that `max_new_tokens` allows."""
    spread: float
    """Standard deviation of a document's seconds, relative to what the rates say."""
    num_documents: int
    """Number of documents that were measured."""
    start_s: float
    """Seconds from the beginning of Ray to a worker with loaded models."""
    device: str
    """Name of the GPU, or of the processor."""


def fit_rates(costs: Sequence[DocumentCost], *, start_s: float, device: str) -> Rates | None:
    """Fit rates to what documents of `draw_sample` cost; None if they are too few, or took no time.

    They were drawn by their tokens, so the mean of their rates stands for all tokens, whatever grows with the length.
    """
    told = [cost for cost in costs if cost.num_prompt_tokens and cost.num_output_tokens]
    if len(told) < MIN_DOCUMENTS or not all(cost.prefill_s + cost.decode_s > 0 for cost in told):
        return None
    prefill = mean(cost.prefill_s / cost.num_prompt_tokens for cost in told)
    decode = mean(cost.decode_s / cost.num_output_tokens for cost in told)
    output_share = mean(cost.num_output_tokens / cost.max_new_tokens for cost in told)
    expected_s = [prefill * cost.num_prompt_tokens + decode * output_share * cost.max_new_tokens for cost in told]
    relative = [(cost.prefill_s + cost.decode_s) / each - 1 for cost, each in zip(told, expected_s, strict=True)]
    return Rates(
        prefill=prefill,
        decode=decode,
        output_share=output_share,
        spread=math.sqrt(sum(each**2 for each in relative) / (len(told) - 1)),
        num_documents=len(told),
        start_s=start_s,
        device=device,
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The wall-clock seconds from the begin of a start until its last document is done."""

    seconds: float
    seconds_low: float
    seconds_high: float
    """The truth lies between the two in about 95 of 100 cases, if the machine is the one that was measured."""
    documents: int
    workers: int
    basis: str
    """Where the rates are from, for people."""


class Outlook:
    """The open documents of a run with the time that they take, by rates."""

    def __init__(self, estimates: Estimates, rates: Rates, max_batch_size: int) -> None:
        """Take all open documents. max_batch_size: documents that a worker decodes at once."""
        self._rates, self._batch = rates, max_batch_size
        self.num_documents = len(estimates)
        """Number of documents, with those that will be refused and take no time."""
        prefill_s = rates.prefill * estimates.num_prompt_tokens.astype(np.float64)
        decode_s = rates.decode * rates.output_share * estimates.max_new_tokens * (estimates.num_prompt_tokens > 0)
        seconds = prefill_s + decode_s
        self.busy_s = float(seconds.sum())
        """Seconds that one worker would be at work, without loading."""
        self._longest_s = float(seconds.max(initial=0.0))
        self._last_s = float((prefill_s + max_batch_size * decode_s).max(initial=0.0))
        """Seconds of the longest document if its neighbours keep it as slow as in a full batch."""
        squares = float((seconds**2).sum()) / self.busy_s**2 if self.busy_s else 0.0
        deviation = rates.spread * math.sqrt(1 / rates.num_documents + squares)
        exponent = math.hypot(DRIFT, _T_95[min(rates.num_documents - 1, len(_T_95)) - 1] * deviation)
        self._factor = math.exp(min(exponent, math.log(MOST_UNCERTAIN))) if self.busy_s else 1.0

    def lasts(self, workers: int) -> Forecast:
        """Forecast the time that so many workers take, loading included; more than documents are of no use.

        No order of the work beats an even share and the longest document. An order that leaves no place empty while
        documents wait exceeds the even share by that document at most.
        """
        workers = max(1, min(workers, self.num_documents))
        even_s = self.busy_s / workers
        low = max(even_s, self._longest_s)
        high = max(low, even_s + (1 - 1 / (workers * self._batch)) * self._last_s)
        start_s = self._rates.start_s if self.busy_s else 0.0
        return Forecast(
            seconds=start_s + math.sqrt(low * high),
            seconds_low=start_s / START_FACTOR + low / self._factor,
            seconds_high=start_s * START_FACTOR + high * self._factor,
            documents=self.num_documents,
            workers=workers,
            basis=f"a calibration of {counted(self._rates.num_documents, 'document')} on {self._rates.device}",
        )

    def documents_per_hour(self, workers: int) -> dict[str, float] | None:
        """Return the documents that so many workers do in an hour while none is idle; None if there are none to do."""
        if not self.busy_s:
            return None
        likely = 3600 * workers * self.num_documents / self.busy_s
        return {"likely": likely, "low": likely / self._factor, "high": likely * self._factor}

    def workers_within(self, limit_s: float, *, surely: bool) -> int | None:
        """Return the fewest workers that are done within `limit_s`; None if no number of workers is.

        surely: the upper bound must lie within the limit, too.
        """
        for workers in range(1, max(1, min(self.num_documents, MAX_WORKERS)) + 1):
            forecast = self.lasts(workers)
            if (forecast.seconds_high if surely else forecast.seconds) <= limit_s:
                return workers
        return None


def cost_of(forecast: Forecast, price_per_worker_hour: float) -> dict[str, float]:
    """Return the price of a forecast: each worker is paid from the begin, loading included, to the end."""
    hours = forecast.workers / 3600
    return {
        "price_per_worker_hour": price_per_worker_hour,
        "worker_hours": hours * forecast.seconds,
        "cost": price_per_worker_hour * hours * forecast.seconds,
        "cost_low": price_per_worker_hour * hours * forecast.seconds_low,
        "cost_high": price_per_worker_hour * hours * forecast.seconds_high,
    }


def draw_sample(estimates: Estimates, size: int, seed: int) -> list[DocumentKey]:
    """Draw documents for a calibration, longest first; all, if there are no more than `size`.

    Their tokens, side by side, are cut into `size` equal parts, and a token is drawn from each: its document is taken.
    So long documents, of which there are few, are represented by the share of the time that they take. Where one
    document is drawn twice, any other one is taken.
    """
    positions = np.flatnonzero(estimates.num_prompt_tokens)
    totals = estimates.totals_at(positions)
    order = np.argsort(-totals, kind="stable")
    positions, ends = positions[order], np.cumsum(totals[order])
    if len(positions) > size:
        draw, step = random.Random(seed), float(ends[-1]) / size
        chosen = {int(ends.searchsorted(step * (part + draw.random()))) for part in range(size)}
        others = np.delete(np.arange(len(positions)), sorted(chosen))
        chosen.update(int(others[place]) for place in draw.sample(range(len(others)), size - len(chosen)))
        positions = positions[sorted(chosen)]
    return [estimates.key(int(position)) for position in positions]


def calibrate(
    prepared: Prepared,
    estimates: Estimates,
    num_documents: int,
    interrupt: Interrupt,
    say: Callable[[str], None],
    factory: EngineFactory = load_engine,
) -> Rates:
    """Decode documents with one real worker, and return the rates of the pair where the worker ran.

    say: takes a line about the progress. factory: makes the worker's engine, on the worker. Raises RefusedError if
    there are too few documents or no worker can run here, WorkersFailError if the worker fails, ClusterError and
    InterruptedRunError.
    """
    check_machine(prepared.config)
    decoding = replace(prepared.config.decoding, audit_fraction=0.0)  # an audit would empty the batch
    config = prepared.config.model_copy(update={"decoding": decoding})
    sample = {key: estimates[key] for key in draw_sample(estimates, num_documents, decoding.seed)}
    if len(sample) < MIN_DOCUMENTS:
        raise RefusedError(f"{_NEEDS}, but got {len(sample)}")
    begin, size = time.monotonic(), decoding.batch_size
    checked = CheckedFactory(factory, prepared.manifest["identity"]["hashes"])
    with connected(interrupt):
        pool = Pool(settle_cores(config), prepared.source, checked, size)
        session = _Session(pool, sample, size, StallGuard(config.job.silence_s, pool.clock()), interrupt)
        try:
            start_s = session.start() - begin
            documents = counted(len(sample), "document")
            say(f"calibrating with {documents} on {session.device}, models loaded after {start_s:.1f} s")
            session.decode()
        finally:
            pool.close()
    rates = fit_rates(session.costs, start_s=start_s, device=session.device)
    if rates is None:
        raise RefusedError(f"{_NEEDS}: {'; '.join(session.failures) or 'their outputs are empty'}")
    return rates


@dataclass(slots=True)
class _Session:
    """One worker and the documents that it decodes: a first one alone, to warm up, then the sample in full batches.

    While the last documents of the sample run, a short one is decoded again and again beside them. Otherwise the rates
    would be those of a batch that empties, which a long run sees only at its end.
    """

    pool: Pool
    sample: Mapping[DocumentKey, TokenEstimate]
    batch_size: int
    guard: StallGuard
    interrupt: Interrupt
    costs: list[DocumentCost] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    device: str = ""
    """Empty until the worker is ready."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _running: set[str] = field(default_factory=set)
    _measured: set[str] = field(default_factory=set)
    """The leases of the sample."""

    def start(self) -> float:
        """Wait until the worker has loaded its models; return `time.monotonic()` of that moment."""
        self.pool.start(_WORKER)
        while not self.device:
            self._turn()
        return time.monotonic()

    def decode(self) -> None:
        """Decode until every document of the sample has its outcome."""
        waiting = list(self.sample)
        shortest = waiting[-1]
        self._hand_out(shortest)
        while self._running:
            self._turn()
        while waiting or self._measured & self._running:
            while waiting and len(self._running) < self.batch_size:
                self._measured.add(self._hand_out(waiting.pop(0)))
            while len(self._running) < self.batch_size:
                self._hand_out(shortest)
            self._turn()

    def _hand_out(self, key: DocumentKey) -> str:
        lease = Lease(f"calibration-{next(self._numbers)}", key, self.sample[key].total, 1)
        self._running.add(lease.lease_id)
        self.pool.run(_WORKER, lease)
        return lease.lease_id

    def _turn(self) -> None:
        self.interrupt.check()
        for event in self.pool.wait(TICK_S):
            self._handle(event)
        if self.guard.is_stalled(self.pool.clock()):
            raise WorkersFailError("the worker of the calibration reads and writes no token")

    def _handle(self, event: Event) -> None:
        match event:
            case Ready(_, info):
                self.device = info.device
            case Polled(worker, report):
                self.guard.stepped(worker, report.num_steps, self.pool.clock())
            case Returned(_, lease, outcome):
                self._running.discard(lease.lease_id)
                self.guard.ended(self.pool.clock())
                if lease.lease_id not in self._measured:
                    return
                if isinstance(outcome, Done):
                    self.costs.append(DocumentCost.of(outcome, self.sample[lease.key].max_new_tokens))
                else:
                    self.failures.append(f"{outcome.error_class}: {outcome.message}")
            case StartFailed(_, reason) | CallLost(_, _, reason) | Died(_, reason, _):
                raise WorkersFailError(f"the worker of the calibration failed: {reason}")
