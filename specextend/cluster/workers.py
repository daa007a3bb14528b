"""Workers of a run: the plan of starts (`Roster`) and the Ray actors (`Pool`)."""

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
"""Seconds between polls of a worker."""
POLLS_PER_S = 250.0
"""Polls of all workers, which take 3% to 5% of a core."""
DRAIN_EVERY_S = 5.0
"""Seconds between questions to Ray about draining nodes."""
GATHER_S = 0.02
"""Seconds to gather answers, because a turn of the driver has a fixed cost."""
START_S = 1800.0
"""Seconds for a process to load its models, before the worker is replaced."""
VERDICT_S = 5.0
"""Seconds for Ray to report the loss of a node."""
MAX_FAILED_STARTS = 5
"""Consecutive, at a seat and without any ready worker, before the run is given up."""
MAX_FRUITLESS_DEATHS = 50
"""Consecutive, without a finished document, before the run is given up."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
PATIENCE_S = 600.0
"""Seconds for which a new worker counts as coming, where a cluster may have no room."""


class Roster:
    """Decides which workers to start. Dead ones are replaced, failed starts repeated later.
    Pure.
    """

    def __init__(self, size: int):
        self._not_before = [0.0] * size
        self._num_failures = [0] * size
        self._seats: dict[str, int] = {}
        """A replacement takes over the seat."""
        self._asked: dict[str, float] = {}
        self._states: dict[str, Literal["loading", "ready", "left out"]] = {}
        self._num_started = self._num_fruitless = 0
        self._is_of_use = False

    @property
    def num_ready(self) -> int:
        """Count the workers that take leases."""
        return [*self._states.values()].count("ready")

    @property
    def num_loading(self) -> int:
        """Count the workers loading models."""
        return [*self._states.values()].count("loading")

    def due(self, now: float, num_wanted: int) -> list[str]:
        """Name the new workers to start, up to `num_wanted` in total."""
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
        """Name superfluous workers not yet ready, the latest first."""
        surplus = max(0, len(self._seats) - num_wanted)
        return list(reversed(self._asked))[:surplus]

    def num_coming(self, now: float) -> int:
        """Count the workers expected soon."""
        return sum(now - asked < PATIENCE_S for asked in self._asked.values())

    def seat(self, worker: str) -> int:
        """Return the seat number, from 1."""
        return self._seats[worker] + 1

    def begun(self, worker: str) -> None:
        """Record a started process."""
        self._states[worker] = "loading"

    def ready(self, worker: str) -> None:
        """Record a ready worker."""
        self._num_failures[self._seats[worker]] = 0
        self._asked.pop(worker, None)
        self._states[worker] = "ready"

    def leave_out(self, worker: str) -> None:
        """Keep an unused worker, because its replacement would run at the same place."""
        self._states[worker] = "left out"

    def failed(self, worker: str, reason: str, now: float) -> float:
        """Record a failed start; return the seconds to wait. Raises RunError after too many."""
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
        """Record the death of a ready worker. Raises RunError after too many.

        Args:
            is_explained: Other workers have died over its documents. These run at the end, so the
                death counts only if no document was ever done.
        """
        self.let_go(worker)
        if is_explained and self._is_of_use:
            return
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            died = counted(self._num_fruitless, "worker") + " died"
            raise RunError(f"{died} in a row without a finished document: {reason}")

    def document_done(self) -> None:
        """Record a finished document."""
        self._is_of_use = True
        self._num_fruitless = 0

    def let_go(self, worker: str) -> int:
        """Record the end of a worker; return its seat, from 0."""
        self._asked.pop(worker, None)
        self._states.pop(worker, None)
        return self._seats.pop(worker)


class _Call(NamedTuple):
    worker: str
    kind: Literal["begun", "ready", "run", "poll"]
    lease: Lease | None = None


@dataclass(slots=True)
class _Actor:
    handle: Any
    info: WorkerInfo | None = None
    host: str = ""
    loads_since: float = math.inf
    poll_at: float = math.inf
    runs: dict[str, Any] = field(default_factory=dict)
    is_draining: bool = False
    dying_since: float | None = None
    is_dead: bool = False
    """False if the actor just does not answer."""


@dataclass(slots=True)
class Pool:
    """Starts, polls and kills workers. The last event of a worker is `Died` or `StartFailed`.

    A killed worker has no further events.
    """

    config: RunConfig
    source: Source
    factory: EngineFactory
    early: list[Any] = field(default_factory=list)
    earlier: Callable[[DocumentKey], Earlier | None] = lambda key: None
    """Finds answers to repeat only some tasks."""
    clock: Callable[[], float] = field(default_factory=AwakeClock)
    _actors: dict[str, _Actor] = field(default_factory=dict)
    _answers: SimpleQueue[tuple[_Call, Future[Any]]] = field(default_factory=SimpleQueue)
    _drain_pace: Pace = field(default_factory=lambda: Pace(DRAIN_EVERY_S))
    _source_ref: Any = None

    def start(self, worker: str) -> None:
        """Start an actor. `Begun` and `Ready` follow, or `StartFailed`."""
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
        """Queue the answer. `ray.wait` would scan all calls each time."""
        reference.future().add_done_callback(lambda future: self._answers.put((call, future)))

    def cancel(self, lease_id: str) -> None:
        """Cancel a call, which returns `Lost`, or its outcome if that was faster."""
        for actor in self._actors.values():
            if lease_id in actor.runs:
                ray.cancel(actor.runs[lease_id])

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the new events; wait up to `timeout_s` for the first."""
        self._poll()
        answers = self._take_answers(timeout_s)
        events = [event for answer in answers for event in self._answer(*answer)]
        return events + self._drains() + self._verdicts() + self._overdue_starts()

    def _take_answers(self, timeout_s: float) -> list[tuple[_Call, Future[Any]]]:
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
        """Kill all workers."""
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
        if (actor := self._actors.get(call.worker)) is None:  # removed with its worker
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
        actor.is_dead |= not isinstance(error, ActorUnavailableError)
        if actor.dying_since is None:
            actor.dying_since = self.clock()
            if not actor.is_dead:
                self._ask(worker, actor)  # tells a dead worker from an unreachable one

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
            cause = error.cause  # raised by our code, or by Ray if a result finds no room
            no_room = isinstance(cause, (ObjectStoreFullError, OutOfDiskError))
            outcome = DocumentError(type(cause).__name__, first_line(cause), "worker", no_room)
        return [Returned(call.worker, call.lease, outcome)]

    def _start_failed(self, worker: str, reason: str) -> StartFailed:
        host = self._actors[worker].host
        self.kill(worker)
        return StartFailed(worker, f"{reason} (on {host})" if host else reason)

    def _overdue_starts(self) -> list[Event]:
        """Give up hanging loads. Workers that wait for resources have not begun."""
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
        if not self._drain_pace.is_due(self.clock()):
            return []
        nodes = state.get_draining_nodes()  # `ray.nodes()` does not show it
        events: list[Event] = []
        for name, actor in self._actors.items():
            if actor.info is None or actor.is_draining or actor.dying_since is not None:
                continue
            if actor.info.node_id in nodes:
                actor.is_draining = True
                events.append(Draining(name))
        return events

    def _verdicts(self) -> list[Event]:
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
            # Ray may still report the loss of the node
            is_known = actor.info.node_id == here and actor.is_dead
            if node_died or is_known or actor.dying_since <= long_ago:
                self.kill(name)
                reason = "its process ended" if actor.is_dead else "it is out of reach"
                events.append(Died(name, reason, node_died or not actor.is_dead))
        return events

    def kill(self, worker: str) -> None:
        """Kill a worker and drop its calls."""
        ray.kill(self._actors.pop(worker).handle, no_restart=True)


def last_line(error: BaseException) -> str:
    """Return the last line of Ray's message, which names the decisive exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
