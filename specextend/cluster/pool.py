"""The pool of workers: it starts and calls Ray actors for the driver, and turns their answers into plain events."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

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

from specextend.cluster.display import Pace
from specextend.cluster.leases import Lease
from specextend.cluster.messages import EngineBrokenError, Failed, Outcome, WorkerInfo, WorkerReport
from specextend.cluster.progress import AwakeClock
from specextend.cluster.worker import EngineFactory, worker_actor
from specextend.config import RunConfig
from specextend.core import first_line
from specextend.data.source import Source

POLL_S = 2.0
"""Seconds between two polls of a worker, if there are few."""
POLLS_PER_S = 250.0
"""Most polls in a second, by all workers together: they take 3% to 5% of a core, however many workers there are."""
DRAIN_EVERY_S = 5.0
"""Seconds between two questions to Ray which nodes are about to go."""
GATHER_S = 0.02
"""Seconds to wait for more answers after the first: a turn of the driver costs the same for one as for many."""
START_S = 1800.0
"""Seconds that a worker may take to load its models, from when it has a process, before it is replaced."""
VERDICT_S = 5.0
"""Seconds to wait, after a worker is gone, for Ray to report that its whole node is."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker has a process: the cluster had room for it."""

    worker: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's models are loaded."""

    worker: str
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker's models could not be loaded."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A lease has its outcome."""

    worker: str
    lease: Lease
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CallLost:
    """A lease's call ended without outcome while its worker lives: it was cancelled, or lost on the way."""

    worker: str
    lease: Lease
    reason: str


@dataclass(frozen=True, slots=True)
class Polled:
    """A worker's progress."""

    worker: str
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker's node is about to go: a spot instance that is reclaimed, or one that is taken out of the cluster."""

    worker: str


@dataclass(frozen=True, slots=True)
class Dying:
    """A worker is gone. The `Died` that follows says what that means for its leases."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Died:
    """The verdict on a worker that is gone."""

    worker: str
    reason: str
    with_node: bool
    """True if its node is down or out of reach, so that no document is to blame."""


Event = Begun | Ready | StartFailed | Returned | CallLost | Polled | Draining | Dying | Died


@dataclass(frozen=True, slots=True)
class _Call:
    """The call whose answer a reference is."""

    worker: str
    kind: Literal["begun", "ready", "run", "poll"]
    lease: Lease | None = None


@dataclass(slots=True)
class _Actor:
    """An actor, its last poll and, if it is dying, since when and of what."""

    handle: Any
    info: WorkerInfo | None = None
    host: str = ""
    """Known once there is a process."""
    loads_since: float | None = None
    calls: dict[Any, _Call] = field(default_factory=dict)
    """Its calls that have not been answered, by reference."""
    is_draining: bool = False
    num_audits: int = 0
    """Rows of its audit that have arrived."""
    dying_since: float | None = None
    reason: str = ""
    has_spoken: bool = False
    """True if it said itself that its engine is broken."""
    is_out_of_reach: bool = False
    """True if all that is known is that it does not answer."""


@dataclass(slots=True)
class Pool:
    """Starts, polls and kills workers. A worker's last event is `Died` or `StartFailed`; none follows `kill`."""

    config: RunConfig
    source: Source
    factory: EngineFactory
    num_leases: int
    clock: Callable[[], float] = field(default_factory=AwakeClock)
    is_ending: bool = False
    """True once no worker gets a further document, which polls say."""
    _actors: dict[str, _Actor] = field(default_factory=dict)
    _runs: dict[str, Any] = field(default_factory=dict)
    _answers: SimpleQueue[tuple[_Call, Any, Future[Any]]] = field(default_factory=SimpleQueue)
    """Calls that have been answered, with their references. Ray puts them in from a thread of its own."""
    _loading: set[str] = field(default_factory=set)
    _dying: set[str] = field(default_factory=set)
    _polls: list[tuple[float, str]] = field(default_factory=list)
    """Heap of the workers to poll, and when."""
    _drain_pace: Pace = field(default_factory=lambda: Pace(DRAIN_EVERY_S))
    _source_ref: Any = None

    def start(self, worker: str) -> None:
        """Start an actor; `Begun` follows, then `Ready`, or `StartFailed` at any time."""
        if self._source_ref is None:
            self._source_ref = ray.put(self.source)
        handle = worker_actor(self.config, self.num_leases).remote(self.config, self._source_ref, self.factory)
        self._actors[worker] = _Actor(handle)
        self._loading.add(worker)
        self._expect(handle.begun.remote(), _Call(worker, "begun"))
        self._expect(handle.ready.remote(), _Call(worker, "ready"))

    def run(self, worker: str, lease: Lease) -> None:
        """Hand a lease to a worker."""
        reference = self._actors[worker].handle.run.remote(lease.lease_id, lease.key, lease.attempt, lease.is_alone)
        self._runs[lease.lease_id] = reference
        self._expect(reference, _Call(worker, "run", lease))

    def _expect(self, reference: Any, call: _Call) -> None:
        """Wait for the answer of a call. `ray.wait` over all calls would cost each turn as much as there are."""
        self._actors[call.worker].calls[reference] = call
        reference.future().add_done_callback(lambda future: self._answers.put((call, reference, future)))

    def cancel(self, lease_id: str) -> None:
        """Cancel a lease's call; `CallLost` follows, or its outcome if that was faster."""
        if (reference := self._runs.get(lease_id)) is not None:
            ray.cancel(reference)

    def kill(self, worker: str) -> None:
        """End a worker and forget its calls."""
        self._forget(worker)

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait for one up to `timeout_s`."""
        self._poll()
        answers = self._take_answers(timeout_s)
        events = [event for answer in answers for event in self._answer(*answer)]
        return events + self._drains() + self._verdicts() + self._overdue_starts()

    def _take_answers(self, timeout_s: float) -> list[tuple[_Call, Any, Future[Any]]]:
        """Take what was answered; wait for a first answer if there is none."""
        answers = []
        try:
            answers.append(self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait())
            time.sleep(GATHER_S)
            while True:
                answers.append(self._answers.get_nowait())
        except Empty:
            return answers

    def close(self) -> None:
        """End every worker."""
        for worker in list(self._actors):
            self._forget(worker)

    def _poll(self) -> None:
        now = self.clock()
        while self._polls and self._polls[0][0] <= now:
            _, worker = heapq.heappop(self._polls)
            if worker in self._actors and worker not in self._dying:
                self._ask(worker)

    def _poll_later(self, worker: str) -> None:
        heapq.heappush(self._polls, (self.clock() + poll_every_s(len(self._actors)), worker))

    def _ask(self, worker: str) -> None:
        actor = self._actors[worker]
        poll = actor.handle.progress.remote(actor.num_audits, self.is_ending)
        self._expect(poll, _Call(worker, "poll"))

    def _answer(self, call: _Call, reference: Any, future: Future[Any]) -> list[Event]:
        actor = self._actors.get(call.worker)
        if actor is None or actor.calls.pop(reference, None) is None:  # forgotten with its worker
            return []
        if call.lease is not None:
            self._runs.pop(call.lease.lease_id, None)
        try:
            value = future.result()
        except (RayActorError, WorkerCrashedError, OutOfMemoryError) as error:
            return self._actor_failed(call, actor, error)
        except RayError as error:
            return self._call_failed(call, actor, error)
        if call.kind == "begun":
            actor.host, actor.loads_since = value, self.clock()
            return [Begun(call.worker)]
        if call.kind == "ready":
            actor.info = value
            self._loading.discard(call.worker)
            self._poll_later(call.worker)
            return [Ready(call.worker, value)]
        if call.kind == "poll":
            self._poll_later(call.worker)
            actor.num_audits += len(value.audits)
            return [Polled(call.worker, value)]
        assert call.lease is not None
        return [Returned(call.worker, call.lease, value)]

    def _actor_failed(self, call: _Call, actor: _Actor, error: RayError) -> list[Event]:
        if call.kind in ("begun", "ready"):
            return self._start_failed(call.worker, actor, _last_line(error))
        if not isinstance(error, ActorUnavailableError):
            actor.is_out_of_reach = False
            return self._dies(call.worker, actor, "its process ended")
        if actor.dying_since is None:
            actor.is_out_of_reach = True
            self._ask(call.worker)  # shows if it is dead or far
        return self._dies(call.worker, actor, "it is out of reach")

    def _call_failed(self, call: _Call, actor: _Actor, error: RayError) -> list[Event]:
        if call.kind in ("begun", "ready"):
            return self._start_failed(call.worker, actor, _last_line(error))
        if isinstance(error, RayTaskError) and isinstance(error.cause, EngineBrokenError):
            actor.has_spoken = True
            return self._dies(call.worker, actor, first_line(error.cause))
        if call.kind == "poll":
            self._poll_later(call.worker)
            return []
        assert call.lease is not None
        if isinstance(error, RayTaskError) and not isinstance(error, TaskCancelledError):
            return [Returned(call.worker, call.lease, unexpected(error))]
        return [CallLost(call.worker, call.lease, first_line(error))]

    def _start_failed(self, worker: str, actor: _Actor, reason: str) -> list[Event]:
        self._forget(worker)
        return [StartFailed(worker, f"{reason} (on {actor.host})" if actor.host else reason)]

    def _overdue_starts(self) -> list[Event]:
        """Give up workers that hang while they load. One that waits for its resources does not load yet."""
        now, limit_s = self.clock(), START_S
        loading = {name: self._actors[name] for name in self._loading}
        late = {
            name: actor
            for name, actor in loading.items()
            if actor.loads_since is not None and now - actor.loads_since > limit_s
        }
        reason = f"its models were not loaded within {limit_s:.0f} s"
        return [event for name, actor in late.items() for event in self._start_failed(name, actor, reason)]

    def _dies(self, worker: str, actor: _Actor, reason: str) -> list[Event]:
        if actor.dying_since is not None:
            return []
        actor.dying_since, actor.reason = self.clock(), reason
        self._dying.add(worker)
        return [Dying(worker, reason)]

    def _drains(self) -> list[Event]:
        """Report, once each, the workers on nodes that are about to go."""
        if not self._drain_pace.is_due(self.clock()):
            return []
        nodes = state.get_draining_nodes()  # `ray.nodes()` does not say it
        found = [
            (name, actor)
            for name, actor in self._actors.items()
            if actor.info is not None and actor.info.node_id in nodes and not actor.is_draining
        ]
        for _, actor in found:
            actor.is_draining = True
        return [Draining(name) for name, actor in found if actor.dying_since is None]

    def _verdicts(self) -> list[Event]:
        """Forget the dying workers whose cause of death is known by now, and report it."""
        dying = {name: self._actors[name] for name in self._dying}
        if not dying:
            return []
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        events: list[Event] = []
        for name, actor in dying.items():
            assert actor.info is not None
            node_died = actor.info.node_id not in alive
            if node_died or self._is_certain(actor):
                self._forget(name)
                events.append(Died(name, actor.reason, node_died or actor.is_out_of_reach))
        return events

    def _is_certain(self, actor: _Actor) -> bool:
        """Return True once the cause cannot become clearer.

        The worker has named it itself, or it ran on our own node, or Ray has had the time to report a dead node.
        """
        assert actor.info is not None
        assert actor.dying_since is not None
        is_here = actor.info.node_id == ray.get_runtime_context().get_node_id()
        if actor.has_spoken or (is_here and not actor.is_out_of_reach):
            return True
        return self.clock() - actor.dying_since >= VERDICT_S

    def _forget(self, worker: str) -> None:
        actor = self._actors.pop(worker)
        ray.kill(actor.handle, no_restart=True)
        self._loading.discard(worker)
        self._dying.discard(worker)
        for call in actor.calls.values():
            if call.lease is not None:
                self._runs.pop(call.lease.lease_id, None)


def poll_every_s(num_workers: int) -> float:
    """Return the seconds from a worker's answer to its next poll."""
    return max(POLL_S, num_workers / POLLS_PER_S)


def unexpected(error: RayTaskError) -> Failed:
    """Turn an exception of our own code, or of Ray about a result that finds no room, into the document's outcome."""
    cause = error.cause
    no_room = isinstance(cause, (ObjectStoreFullError, OutOfDiskError))
    return Failed("", type(cause).__name__, first_line(cause), "worker", retryable=no_room)


def _last_line(error: BaseException) -> str:
    """Return the last line of Ray's message, which names the exception that mattered."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
