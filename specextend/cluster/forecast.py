"""Forecasts: how long the open documents of a run will take, with how many workers, and within which bounds. Pure.

Two bounds enclose what a number of workers needs. The lower one lets each worker do its documents one after the other
at the rate of a full batch; the upper one lets each document take as long as in a full batch, even when it is the last
one. They are far apart only if there are few documents. `docs/planning.md` describes the method.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specextend.cluster.estimates import Estimates
from specextend.cluster.rates import Numbers, Rates
from specextend.config import MAX_WORKERS
from specextend.core import counted

DRIFT = 0.1
"""Relative error of any rate, however many documents it comes from: the same machine differs by that from hour to hour
(`docs/log.md`)."""
START_FACTOR = 1.5
"""Factor by which loading may take longer or shorter: a single start was measured, with files cached or not."""
MOST_UNCERTAIN = 20.0
"""Largest factor of an interval: rates that are known no better say nothing, but must not overflow a clock."""
MOST_PLACED = 20_000
"""Longest documents that are placed one by one; the rest, which are the shortest, fill the gaps."""
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 95%, two-sided, by degrees of freedom from 1 on."""
_T_MORE = ((20, 2.12), (30, 2.09), (60, 2.04), (math.inf, 2.00))
"""The same up to these degrees of freedom, rounded up."""


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
    """The open documents of a run with the time that each takes, by rates."""

    def __init__(self, estimates: Estimates, rates: Rates, max_batch_size: int) -> None:
        """Take all open documents. max_batch_size: documents that a worker decodes at once."""
        self._rates, self._batch = rates, max_batch_size
        self.num_documents = len(estimates)
        """Number of documents, with those that will be refused and take no time."""
        is_done = estimates.num_prompt_tokens > 0
        columns = (estimates.num_prompt_tokens, estimates.max_new_tokens, estimates.num_requests)
        prompts, limits, requests = (column[is_done].astype(np.float64) for column in columns)
        prefill_s = rates.prefill_s(prompts, requests)
        decode_s = rates.decode_s(prompts, limits, requests)
        order = np.argsort(-(prefill_s + decode_s), kind="stable")
        self._prefill_s, self._decode_s = prefill_s[order], decode_s[order]
        self._requests = estimates.num_requests[is_done][order]
        self.busy_s = float(prefill_s.sum() + decode_s.sum())
        """Seconds that one worker would be at work, without loading."""
        self._factor = _uncertainty(rates, self._prefill_s + self._decode_s)

    def lasts(self, workers: int) -> Forecast:
        """Forecast the time that so many workers take, loading included; more than documents are of no use."""
        workers = max(1, min(workers, self.num_documents))
        low = makespan(self._prefill_s + self._decode_s, workers)
        high = max(low, makespan(self._prefill_s, workers) + self._decoding_s(workers))
        start_s = self._rates.start_s if self.busy_s else 0.0
        return Forecast(
            seconds=start_s + math.sqrt(low * high),
            seconds_low=start_s / START_FACTOR + low / self._factor,
            seconds_high=start_s * START_FACTOR + high * self._factor,
            documents=self.num_documents,
            workers=workers,
            basis=f"{self._rates.origin} of {counted(self._rates.num_documents, 'document')} on {self._rates.device}",
        )

    def _decoding_s(self, workers: int) -> float:
        """Return the seconds of decoding if each request takes as long as in a full batch, even the last ones.

        The parts of a document are decoded at the same time, but its merge follows them.
        """
        seconds = self._batch * self._decode_s / self._requests
        merge_s = float(seconds[self._requests > 1].max(initial=0.0))
        return makespan(np.repeat(seconds, self._requests), workers * self._batch) + merge_s

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

        def is_late(workers: int) -> bool:
            forecast = self.lasts(workers)
            return (forecast.seconds_high if surely else forecast.seconds) > limit_s

        few, enough = 0, max(1, min(self.num_documents, MAX_WORKERS))
        if is_late(enough):
            return None
        while enough - few > 1:
            middle = (few + enough) // 2
            few, enough = (middle, enough) if is_late(middle) else (few, middle)
        return enough


def makespan(seconds: Numbers | Sequence[float], num_places: int) -> float:
    """Return when the last of these jobs ends if each place takes the next one as soon as it has done the one before.

    seconds: of each job, in the order in which they are taken.
    """
    ends = [0.0] * min(num_places, len(seconds))
    for job_s in map(float, seconds[:MOST_PLACED]):
        heapq.heapreplace(ends, ends[0] + job_s)
    rest_s = float(np.sum(seconds[MOST_PLACED:]))
    return max(max(ends), (sum(ends) + rest_s) / len(ends)) if ends else 0.0


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


def _uncertainty(rates: Rates, seconds: Numbers) -> float:
    """Return the factor by which the time of documents, `seconds` each, may be longer or shorter than expected.

    A prediction interval for a sum: the mean was measured on `rates.num_documents` documents, and those to come differ
    from what is expected by as large a part of it as the measured ones did.
    """
    if not len(seconds) or not seconds.sum():
        return 1.0
    of_document = rates.spread_s / rates.mean_s
    of_mean = of_document / math.sqrt(rates.num_documents)
    of_sum = of_document * float(np.sqrt((seconds**2).sum()) / seconds.sum())
    exponent = math.hypot(DRIFT, _student_t(rates.num_documents - 1) * math.hypot(of_mean, of_sum))
    return math.exp(min(exponent, math.log(MOST_UNCERTAIN)))


def _student_t(freedom: int) -> float:
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    return next(t for most, t in _T_MORE if freedom <= most)
