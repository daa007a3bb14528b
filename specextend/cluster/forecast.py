"""Forecasts: a worker decodes some documents, and what they took says how long all of them will take.

`calibrate` decodes a sample on the Ray that the run would use and fits `Rates`: seconds per prompt token, seconds per
output token, and how much documents differ. `Outlook` makes of them the time of a number of workers, with bounds.
`docs/planning-and-report.md` describes the method. Nothing is written, and nothing is kept for a later start.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from specextend.cluster.backlog import Estimates
from specextend.cluster.checks import Prepared, check_machine
from specextend.cluster.environment import connected, settle_cores, start_worker
from specextend.cluster.exits import Interrupt, RefusedError, WorkersFailError
from specextend.cluster.messages import Done, Outcome
from specextend.cluster.worker import EngineFactory, checked_engine
from specextend.cluster.workers import last_line
from specextend.config import MAX_WORKERS
from specextend.core import DocumentKey, counted
from specextend.loading import load_engine
from specextend.stats import DecodingStats, ratio

MIN_DOCUMENTS = 2
"""Fewest documents that rates can be fitted to: one says nothing about how documents differ."""
DRIFT = 0.1
"""Relative error of any rate, however many documents it comes from: the same machine differs by that from hour to hour
(`docs/dev/log.md`)."""
START_FACTOR = 1.5
"""Factor by which loading may take longer or shorter: a single start was measured, with files cached or not."""
MOST_UNCERTAIN = 20.0
"""Largest factor of an interval: rates that are known no better say nothing, but must not overflow a clock."""
TICK_S = 0.2
"""Seconds to wait for an answer before clock and signals are checked again."""
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 95%, two-sided, by degrees of freedom from 1 on; the last one stands for all above."""
_NEEDS = f"--calibrate needs {counted(MIN_DOCUMENTS, 'document')} that can be decoded"


class DocumentCost(NamedTuple):
    """The seconds of its worker that a decoded document took; those that a batch shares are divided among it."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    prefill_s: float
    decode_s: float


def document_cost(stats: DecodingStats, max_new_tokens: int) -> DocumentCost:
    """Return what a document took, as if nothing of its prompt had been read for another one."""
    share_read = 1 - (ratio(stats.num_cached_tokens, stats.num_prompt_tokens) or 0.0)
    prefill_s = stats.prefill_s / share_read + stats.draft_prefill_s
    return DocumentCost(stats.num_prompt_tokens, stats.num_output_tokens, max_new_tokens, prefill_s, stats.step_s)


@dataclass(frozen=True, kw_only=True)
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
    prompts, outputs, allowed, prefill_s, decode_s = np.array(told, np.float64).T
    prefill, decode = (prefill_s / prompts).mean(), (decode_s / outputs).mean()
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


@dataclass(frozen=True)
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

    def __init__(self, estimates: Estimates, rates: Rates, max_batch_size: int):
        """Take all open documents. max_batch_size: documents that a worker decodes at once."""
        self._rates, self._batch, self._num_documents = rates, max_batch_size, len(estimates)
        prefill_s = rates.prefill * estimates.num_prompt_tokens.astype(np.float64)
        decode_s = rates.decode * rates.output_share * estimates.max_new_tokens * (estimates.num_prompt_tokens > 0)
        seconds = prefill_s + decode_s
        self._busy_s = float(seconds.sum())
        """Seconds that one worker would be at work, without loading."""
        self._longest_s = float(seconds.max(initial=0.0))
        self._last_s = float((prefill_s + max_batch_size * decode_s).max(initial=0.0))
        """Seconds of the longest document if its neighbours keep it as slow as in a full batch."""
        squares = float((seconds**2).sum()) / self._busy_s**2 if self._busy_s else 0.0
        deviation = rates.spread * math.sqrt(1 / rates.num_documents + squares)
        exponent = math.hypot(DRIFT, _T_95[min(rates.num_documents - 1, len(_T_95)) - 1] * deviation)
        self._factor = math.exp(min(exponent, math.log(MOST_UNCERTAIN)))

    def lasts(self, workers: int) -> Forecast:
        """Forecast the time that so many workers take, loading included; more than documents are of no use.

        No order of the work beats an even share and the longest document. An order that leaves no place empty while
        documents wait exceeds the even share by that document at most.
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
            basis=f"a calibration of {counted(self._rates.num_documents, 'document')} on {self._rates.device}",
        )

    def workers_within(self, limit_s: float, *, surely: bool) -> int | None:
        """Return the fewest workers that are done within `limit_s`; None if no number of workers is.

        surely: the upper bound must lie within the limit, too.
        """
        for workers in range(1, max(1, min(self._num_documents, MAX_WORKERS)) + 1):
            forecast = self.lasts(workers)
            if (forecast.seconds_high if surely else forecast.seconds) <= limit_s:
                return workers
        return None


def draw_sample(estimates: Estimates, size: int, seed: int) -> list[DocumentKey]:
    """Draw documents for a calibration, longest first; all, if there are no more than `size`.

    A document is drawn by its share of all tokens. So long documents, of which there are few, are represented by the
    share of the time that they take.
    """
    positions = np.flatnonzero(estimates.num_prompt_tokens)
    if len(positions) > size:
        totals = estimates.totals(positions)
        positions = np.random.default_rng(seed).choice(positions, size, replace=False, p=totals / totals.sum())
    order = np.argsort(-estimates.totals(positions), kind="stable")
    return [estimates.key(int(position)) for position in positions[order]]


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
    config = prepared.config
    decoding = config.decoding
    sample = draw_sample(estimates, num_documents, decoding.seed)
    if len(sample) < MIN_DOCUMENTS:
        raise RefusedError(f"{_NEEDS}, but got {len(sample)}")
    begin, size = time.monotonic(), decoding.batch_size
    checked = partial(checked_engine, factory=factory, hashes=prepared.manifest["identity"]["hashes"])
    with connected(interrupt):
        config = settle_cores(config)
        actor = start_worker(config.job)
        wait = partial(_first_answer, interrupt=interrupt, limit_s=config.job.silence_s)
        try:
            _, info = wait([actor.ready.remote(config, prepared.source, checked)])
            start_s = time.monotonic() - begin
            documents = counted(len(sample), "document")
            say(f"calibrating with {documents} on {info.device}, models loaded after {start_s:.1f} s")
            outcomes = _decode(actor, sample, size, wait)
        finally:
            ray.kill(actor)
    done = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Done)}
    costs = [document_cost(outcome.stats, estimates[key].max_new_tokens) for key, outcome in done.items()]
    rates = fit_rates(costs, start_s=start_s, device=info.device)
    if rates is None:
        failed = [f"{each.error_class}: {each.message}" for each in outcomes.values() if not isinstance(each, Done)]
        raise RefusedError(f"{_NEEDS}: {'; '.join(failed) or 'their outputs are empty'}")
    return rates


def _decode(
    actor: Any, sample: Sequence[DocumentKey], size: int, wait: Callable[[list[Any]], tuple[Any, Any]]
) -> dict[DocumentKey, Outcome]:
    """Decode the last document alone, to warm up, then the sample in full batches of `size`.

    While the last documents of the sample run, a short one is decoded again and again beside them. Otherwise the rates
    would be those of a batch that empties, which a long run sees only at its end. wait: `_first_answer`.
    """
    numbers, waiting, outcomes = itertools.count(), list(sample), dict[DocumentKey, Outcome]()

    def hand_out(key: DocumentKey) -> Any:
        return actor.run.remote(f"calibration-{next(numbers)}", key, 1)

    wait([hand_out(sample[-1])])
    running: dict[Any, DocumentKey | None] = {}
    """The calls, each with its document if that is of the sample."""
    while len(outcomes) < len(sample):
        while len(running) < size:
            key = waiting.pop(0) if waiting else None
            running[hand_out(sample[-1] if key is None else key)] = key
        call, outcome = wait(list(running))
        if (key := running.pop(call)) is not None:
            outcomes[key] = outcome
    return outcomes


def _first_answer(calls: list[Any], interrupt: Interrupt, limit_s: float) -> tuple[Any, Any]:
    """Wait for the first of some calls to end; return it with its answer.

    Raises WorkersFailError if it failed or none ends within `limit_s`, and InterruptedRunError.
    """
    give_up_at = time.monotonic() + limit_s
    done: list[Any] = []
    while not done:
        interrupt.check()
        if time.monotonic() >= give_up_at:
            raise WorkersFailError(f"the worker of the calibration has not answered for {limit_s:.0f} s")
        done, _ = ray.wait(calls, timeout=TICK_S)
    try:
        return done[0], ray.get(done[0])
    except RayError as error:
        raise WorkersFailError(f"the worker of the calibration failed: {last_line(error)}") from error
