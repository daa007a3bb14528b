"""The workers of a run: which to start, replace or give up (`Roster`), and their Ray actors
(`Pool`).
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple

import ray
from ray._private.state import state
from ray.exceptions import (
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from specextend.cluster.environment import start_worker
from specextend.cluster.exits import RunError
from specextend.cluster.messages import (
    Begun,
    Died,
    Draining,
    Event,
    Lease,
    Lost,
    Outcome,
    Polled,
    Ready,
    Returned,
    StartFailed,
    WorkerInfo,
)
from specextend.cluster.progress import AwakeClock, Pace
from specextend.cluster.worker import EngineFactory
from specextend.config import RunConfig
from specextend.core import DocumentKey, counted, first_line
from specextend.data.commits import Earlier
from specextend.data.inputs import DocumentError
from specextend.data.source import Source

POLL_S = 2.0
"""Seconds between two polls of a worker, if there are few."""
POLLS_PER_S = 250.0
"""Most polls in a second, by all workers together: they take 3% to 5% of a core, however many
workers there are.
"""
DRAIN_EVERY_S = 5.0
"""Seconds between two questions to Ray which nodes are about to go."""
GATHER_S = 0.02
"""Seconds to wait for more answers after the first: a turn of the driver costs the same for one as
for many.
"""
START_S = 1800.0
"""Seconds that a worker may take to load its models, from when it has a process, before it is
replaced.
"""
VERDICT_S = 5.0
"""Seconds to wait, after a worker is gone, for Ray to report that its whole node is."""
MAX_FAILED_STARTS = 5
"""Workers that cannot be built in a row on one seat, while no other worker is ready, before the run
is given up.
"""
MAX_FRUITLESS_DEATHS = 50
"""Workers that die in a row, with no document done in between, before the run is given up."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
PATIENCE_S = 600.0
"""Seconds during which a worker that is being built counts as coming; a cluster may have no room
for it.
"""


class Roster:
    """Up to `size` workers: each that dies is replaced, after a growing pause if the new one cannot
    be built. Pure.
    """

    def __init__(self, size: int):
        self._not_before = [0.0] * size
        """When a worker may be started on each seat."""
        self._num_failures = [0] * size
        """Workers in a row that could not be built, by seat."""
        self._seats: dict[str, int] = {}
        """Of each worker. One that dies leaves its seat to its successor."""
        self._asked: dict[str, float] = {}
        """The workers that are not ready yet, and when each was asked for."""
        self._loading: set[str] = set()
        """Those of them that have a process."""
        self._ready: set[str] = set()
        self._num_started = self._num_fruitless = 0
        self._is_of_use = False

    @property
    def num_ready(self) -> int:
        """Count the workers that take leases."""
        return len(self._ready)

    @property
    def num_loading(self) -> int:
        """Count the workers that load their models."""
        return len(self._loading)

    def due(self, now: float, num_wanted: int) -> list[str]:
        """Name the new workers to start now, so that there are no more in all than are wanted."""
        room = max(0, num_wanted - len(self._seats))
        taken = set(self._seats.values())
        vacant = (
            seat
            for seat, begin in enumerate(self._not_before)
            if begin <= now and seat not in taken
        )
        names: list[str] = []
        for seat in islice(vacant, room):
            self._num_started += 1
            names.append(name := f"worker-{self._num_started}")
            self._seats[name], self._asked[name] = seat, now
        return names

    def not_needed(self, num_wanted: int) -> list[str]:
        """Name the workers that need not be built any more, the last asked for first."""
        surplus = max(0, len(self._seats) - num_wanted)
        return list(reversed(self._asked))[:surplus]

    def num_coming(self, now: float) -> int:
        """Count the workers that are being built and not overdue."""
        return sum(now - asked < PATIENCE_S for asked in self._asked.values())

    def seat(self, worker: str) -> int:
        """Return the number of a worker's seat, from 1, which its successor takes over."""
        return self._seats[worker] + 1

    def begun(self, worker: str) -> None:
        """Note that a worker has a process."""
        self._loading.add(worker)

    def ready(self, worker: str) -> None:
        """Note that a worker's models are loaded."""
        self._num_failures[self._seats[worker]] = 0
        self._asked.pop(worker, None)
        self._loading.discard(worker)
        self._ready.add(worker)

    def leave_out(self, worker: str) -> None:
        """Keep a worker that takes no documents, because its successor would run at the same
        place.
        """
        self._ready.discard(worker)

    def failed(self, worker: str, reason: str, now: float) -> float:
        """Note that a worker could not be built. Returns the seconds until the next try.

        Raises RunError after too many failures.
        """
        seat = self.let_go(worker)
        self._num_failures[seat] += 1
        num_failures = self._num_failures[seat]
        if num_failures >= MAX_FAILED_STARTS and not self.num_ready:
            raise RunError(
                f"workers cannot be built, {num_failures} tries in a row failed: {reason}"
            )
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_failures - 1))
        self._not_before[seat] = now + pause
        return pause

    def died(self, worker: str, reason: str, *, is_explained: bool = False) -> None:
        """Note that a worker which had been ready is gone. Raises RunError if workers only
        die.

        is_explained: others have died over its documents. Such documents run at the end, when
        nothing else gets done in between, so such deaths count only if no document was ever done.
        """
        self.let_go(worker)
        if is_explained and self._is_of_use:
            return
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            died = counted(self._num_fruitless, "worker") + " died"
            raise RunError(f"{died} and no document was done between: {reason}")

    def document_done(self) -> None:
        """Note that a document is done, so that the workers are of use."""
        self._is_of_use = True
        self._num_fruitless = 0

    def let_go(self, worker: str) -> int:
        """Note that a worker was ended, for whatever reason, and return the number of its seat,
        from 0.
        """
        self._asked.pop(worker, None)
        self._loading.discard(worker)
        self._ready.discard(worker)
        return self._seats.pop(worker)


class _Call(NamedTuple):
    """A call that is to be answered."""

    worker: str
    kind: Literal["begun", "ready", "run", "poll"]
    lease: Lease | None = None


@dataclass(slots=True)
class _Actor:
    """An actor, its next poll and, if it is dying, since when."""

    handle: Any
    info: WorkerInfo | None = None
    host: str = ""
    """Known once there is a process."""
    loads_since: float = math.inf
    poll_at: float = math.inf
    runs: dict[str, Any] = field(default_factory=dict)
    """The references to what will become of its leases, by lease id."""
    is_draining: bool = False
    dying_since: float | None = None
    is_dead: bool = False
    """False if all that is known is that it does not answer."""


@dataclass(slots=True)
class Pool:
    """Starts, polls and kills workers. A worker's last event is `Died` or `StartFailed`; none
    follows `kill`.
    """

    config: RunConfig
    source: Source
    factory: EngineFactory
    early: list[Any] = field(default_factory=list)
    """Actors that have been started already."""
    earlier: Callable[[DocumentKey], Earlier | None] = lambda key: None
    """Finds the answers of earlier starts to a document of which only some tasks are to be done."""
    clock: Callable[[], float] = field(default_factory=AwakeClock)
    _actors: dict[str, _Actor] = field(default_factory=dict)
    _answers: SimpleQueue[tuple[_Call, Future[Any]]] = field(default_factory=SimpleQueue)
    """Calls that have been answered. Ray puts them in from a thread of its own."""
    _drain_pace: Pace = field(default_factory=lambda: Pace(DRAIN_EVERY_S))
    _source_ref: Any = None

    def start(self, worker: str) -> None:
        """Start an actor; `Begun` follows, then `Ready`, or `StartFailed` at any time."""
        if self._source_ref is None:
            self._source_ref = ray.put(self.source)
        handle = self.early.pop() if self.early else start_worker(self.config.job)
        self._actors[worker] = _Actor(handle)
        self._expect(handle.begun.remote(), _Call(worker, "begun"))
        self._expect(
            handle.ready.remote(self.config, self._source_ref, self.factory), _Call(worker, "ready")
        )

    def run(self, worker: str, lease: Lease) -> None:
        """Hand a lease to a worker."""
        actor = self._actors[worker]
        run = actor.handle.run.remote(
            lease.lease_id, lease.key, lease.attempt, lease.is_alone, self.earlier(lease.key)
        )
        actor.runs[lease.lease_id] = run
        self._expect(run, _Call(worker, "run", lease))

    def _expect(self, reference: Any, call: _Call) -> None:
        """Wait for the answer of a call. `ray.wait` over all calls would cost each turn as much as
        there are.
        """
        reference.future().add_done_callback(lambda future: self._answers.put((call, future)))

    def cancel(self, lease_id: str) -> None:
        """Cancel a lease's call; it returns as `Lost`, or with its outcome if that was faster."""
        for actor in self._actors.values():
            if lease_id in actor.runs:
                ray.cancel(actor.runs[lease_id])

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait for one up to `timeout_s`."""
        self._poll()
        answers = self._take_answers(timeout_s)
        events = [event for answer in answers for event in self._answer(*answer)]
        return events + self._drains() + self._verdicts() + self._overdue_starts()

    def _take_answers(self, timeout_s: float) -> list[tuple[_Call, Future[Any]]]:
        """Take what was answered; wait for a first answer if there is none."""
        answers = []
        try:
            answers.append(
                self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait()
            )
            time.sleep(GATHER_S)
            while True:
                answers.append(self._answers.get_nowait())
        except Empty:
            return answers

    def close(self) -> None:
        """End every worker."""
        for worker in list(self._actors):
            self.kill(worker)

    def _poll(self) -> None:
        now = self.clock()
        for worker, actor in self._actors.items():
            if actor.poll_at <= now and actor.dying_since is None:
                self._ask(worker, actor)

    def _ask(self, worker: str, actor: _Actor) -> None:
        actor.poll_at = math.inf
        self._expect(actor.handle.progress.remote(), _Call(worker, "poll"))

    def _answer(self, call: _Call, future: Future[Any]) -> list[Event]:
        if (actor := self._actors.get(call.worker)) is None:  # forgotten with its worker
            return []
        if call.kind in ("ready", "poll"):
            actor.poll_at = self.clock() + max(POLL_S, len(self._actors) / POLLS_PER_S)
        if call.lease is not None:
            del actor.runs[call.lease.lease_id]
        try:
            value = future.result()
        except RayError as error:
            return self._call_failed(call, actor, error)
        if call.lease is not None:
            return [Returned(call.worker, call.lease, value)]
        if call.kind == "poll":
            return [Polled(call.worker, value)]
        if call.kind == "ready":
            actor.info = value
            return [Ready(call.worker, value)]
        actor.host, actor.loads_since = value, self.clock()
        return [Begun(call.worker)]

    def _actor_failed(self, worker: str, actor: _Actor, error: RayError) -> None:
        """Note that a worker is gone; `_verdicts` reports it."""
        actor.is_dead |= not isinstance(error, ActorUnavailableError)
        if actor.dying_since is None:
            actor.dying_since = self.clock()
            if not actor.is_dead:
                self._ask(worker, actor)  # shows if it is dead or far

    def _call_failed(self, call: _Call, actor: _Actor, error: RayError) -> list[Event]:
        if call.kind in ("begun", "ready"):
            return [self._start_failed(call.worker, last_line(error))]
        if isinstance(error, RayActorError | WorkerCrashedError | OutOfMemoryError):
            self._actor_failed(call.worker, actor, error)
            return []
        if call.lease is None:
            return []
        outcome: Outcome = Lost(first_line(error))
        if isinstance(error, RayTaskError) and not isinstance(error, TaskCancelledError):
            cause = error.cause  # of our own code, or of Ray about a result that finds no room
            no_room = isinstance(cause, (ObjectStoreFullError, OutOfDiskError))
            outcome = DocumentError(type(cause).__name__, first_line(cause), "worker", no_room)
        return [Returned(call.worker, call.lease, outcome)]

    def _start_failed(self, worker: str, reason: str) -> StartFailed:
        host = self._actors[worker].host
        self.kill(worker)
        return StartFailed(worker, f"{reason} (on {host})" if host else reason)

    def _overdue_starts(self) -> list[Event]:
        """Give up workers that hang while they load. One that waits for its resources does not load
        yet.
        """
        latest = self.clock() - START_S
        late = [
            name
            for name, actor in self._actors.items()
            if actor.info is None and actor.loads_since < latest
        ]
        return [
            self._start_failed(name, f"its models were not loaded within {START_S:.0f} s")
            for name in late
        ]

    def _drains(self) -> list[Event]:
        """Report, once each, the workers on nodes that are about to go."""
        if not self._drain_pace.is_due(self.clock()):
            return []
        nodes = state.get_draining_nodes()  # `ray.nodes()` does not say it
        events: list[Event] = []
        for name, actor in self._actors.items():
            if actor.info is None or actor.is_draining or actor.dying_since is not None:
                continue
            if actor.info.node_id in nodes:
                actor.is_draining = True
                events.append(Draining(name))
        return events

    def _verdicts(self) -> list[Event]:
        """Forget the workers that are gone and whose cause of death is known by now, and report
        it.
        """
        dying = {
            name: actor for name, actor in self._actors.items() if actor.dying_since is not None
        }
        if not dying:
            return []
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        here = ray.get_runtime_context().get_node_id()
        long_ago = self.clock() - VERDICT_S
        events: list[Event] = []
        for name, actor in dying.items():
            assert actor.info is not None
            assert actor.dying_since is not None
            node_died = actor.info.node_id not in alive
            # of others Ray may yet report the node
            is_known = actor.info.node_id == here and actor.is_dead
            if node_died or is_known or actor.dying_since <= long_ago:
                self.kill(name)
                reason = "its process ended" if actor.is_dead else "it is out of reach"
                events.append(Died(name, reason, node_died or not actor.is_dead))
        return events

    def kill(self, worker: str) -> None:
        """End a worker and forget its calls."""
        ray.kill(self._actors.pop(worker).handle, no_restart=True)


def last_line(error: BaseException) -> str:
    """Return the last line of Ray's message, which names the exception that mattered."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
