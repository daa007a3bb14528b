"""Calibration: one real worker decodes documents of the input, and rates are fitted to what they cost.

The worker is an actor on the Ray that the run would use, with the batches of a real one. Nothing is written to the
output folder.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from specextend.cluster.cluster import connected
from specextend.cluster.estimates import Estimates, TokenEstimate
from specextend.cluster.exits import Interrupt, RefusedError, WorkersFailError
from specextend.cluster.leases import Lease
from specextend.cluster.messages import Done
from specextend.cluster.planning import Plan
from specextend.cluster.pool import CallLost, Died, Event, Polled, Pool, Ready, Returned, StartFailed
from specextend.cluster.prepare import Prepared, check_machine
from specextend.cluster.progress import StallGuard
from specextend.cluster.rates import MIN_DOCUMENTS, DocumentCost, Rates, fit_rates
from specextend.cluster.worker import CheckedFactory, EngineFactory
from specextend.config import RunConfig
from specextend.core import DocumentKey, counted
from specextend.loading import load_engine

TICK_S = 0.2
"""Seconds to wait for an event before clock and signals are checked again."""
_WORKER = "worker-1"
_NEEDS = f"--calibrate needs {counted(MIN_DOCUMENTS, 'document')} that can be decoded"


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
    plan: Plan,
    num_documents: int,
    interrupt: Interrupt,
    say: Callable[[str], None],
    factory: EngineFactory = load_engine,
) -> Rates:
    """Decode documents of the plan, and return the rates of the pair where the worker ran.

    say: takes a line about the progress. factory: makes the worker's engine, on the worker. Raises RefusedError if
    there are too few documents or no worker can run here, WorkersFailError if the worker fails, ClusterError and
    InterruptedRunError.
    """
    config = _without_audit(prepared.config)
    check_machine(config)
    sample = {key: plan.estimates[key] for key in draw_sample(plan.estimates, num_documents, config.decoding.seed)}
    if len(sample) < MIN_DOCUMENTS:
        raise RefusedError(f"{_NEEDS}, but got {len(sample)}")
    begin = time.monotonic()
    with connected(interrupt):
        batch_size = config.decoding.batch_size
        pool = Pool(
            config, prepared.source, CheckedFactory(factory, prepared.manifest["identity"]["hashes"]), batch_size
        )
        session = _Session(pool, sample, batch_size, StallGuard(config.job.silence_s, pool.clock()), interrupt)
        try:
            start_s = session.start() - begin
            documents = counted(len(sample), "document")
            say(f"calibrating with {documents} on {session.device}, models loaded after {start_s:.1f} s")
            session.decode()
        finally:
            pool.close()
    costs, device, origin = session.costs, session.device, "a calibration"
    rates = fit_rates(costs, start_s=start_s, device=device, origin=origin, measured_at=time.time())
    if rates is None:
        why = "; ".join(session.failures) or "their outputs are empty"
        raise RefusedError(f"{_NEEDS}: {why}")
    return rates


def _without_audit(config: RunConfig) -> RunConfig:
    """Leave the audit out, which would empty the batch that is measured."""
    return config.model_copy(update={"decoding": replace(config.decoding, audit_fraction=0.0)})


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
                    limit = self.sample[lease.key].max_new_tokens
                    self.costs.append(DocumentCost.of(outcome, limit))
                else:
                    self.failures.append(f"{outcome.error_class}: {outcome.message}")
            case StartFailed(_, reason) | CallLost(_, _, reason) | Died(_, reason, _):
                raise WorkersFailError(f"the worker of the calibration failed: {reason}")
