"""Who works on which document, and what a death costs whom. Pure: no Ray, no clock of its own, no files.

A document is open until `finish` or a `GivenUp` names it; it is leased to at most one worker at a time. Times
are seconds of any monotonic clock that the caller passes in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from specextend.core import DocumentKey

MAX_UNCHARGED_EXPOSURES = 2
"""Deaths a document may sit through, not known to have started, before it runs alone."""
MAX_LOSSES = 10
"""Nodes a document may lose before it is given up."""
PAUSE_S = 10.0
"""Seconds before a document that nobody could read is tried again, and before a worker that could not gets another."""
LONGEST_PAUSE_S = 600.0
"""Of such a worker, whose pause doubles as long as it reads nothing."""
LENGTH_STEP = 1.1
"""Documents whose lengths differ by less than about this factor go in input order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a document or a worker has had enough."""

    max_attempts: int = 3
    """Charged attempts before a document becomes an error row."""
    max_losses: int = MAX_LOSSES
    """Uncharged ones, lost with their node."""
    deadline_base_s: float = 600.0
    """Seconds a document may take from the start of its prefill, whatever its length."""
    deadline_s_per_token: float = 1.0
    """Seconds more for each of its tokens."""
    stall_s: float = 600.0
    """Seconds without a step before a worker counts as hung."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One document handed to one worker, once."""

    lease_id: str
    key: DocumentKey
    num_tokens: int
    """Prompt and output, estimated."""
    attempt: int
    """1 for the first; what the row's `attempts` becomes."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A document that becomes an error row."""

    key: DocumentKey
    attempts: int
    error_class: str
    message: str


@dataclass(slots=True)
class _Item:
    """A document's standing."""

    key: DocumentKey
    num_tokens: int
    attempts: int = 0
    strikes: int = 0
    """Attempts that may have ended by its fault, and taken neighbours along."""
    losses: int = 0
    exposures: int = 0
    num_leases: int = 0

    @property
    def runs_alone(self) -> bool:
        """Whether it may take neighbours with it."""
        return self.strikes > 0 or max(self.exposures, self.losses) >= MAX_UNCHARGED_EXPOSURES


@dataclass(slots=True)
class _Held:
    """A lease in force."""

    lease: Lease
    item: _Item
    worker: str
    started_at: float | None = None
    is_queued: bool = False
    """Whether the worker has said that its prefill has not begun."""


@dataclass(slots=True)
class _Worker:
    """What a worker holds."""

    leases: dict[str, _Held] = field(default_factory=dict)
    alone: bool = False
    takes_leases: bool = True
    num_closing: int = 0
    """Leases taken back whose call has not returned yet."""
    expired_at_step: int | None = None
    """The step counter when a lease was last taken back: until it moves, the engine may still hang in that one."""
    num_steps: int = -1
    moved_at: float = 0.0
    blind_until: float = -math.inf
    """It gets no leases until then, as it could not read one."""
    pause_s: float = PAUSE_S
    """Seconds of its next such pause."""

    @property
    def is_empty(self) -> bool:
        """No lease, not even one being taken back."""
        return not self.leases and not self.num_closing

    @property
    def may_hang(self) -> bool:
        """Whether it may still be busy with a lease that was taken back from it."""
        return self.expired_at_step is not None and self.expired_at_step == self.num_steps

    @property
    def num_taken(self) -> int:
        """Leases, with those being taken back."""
        return len(self.leases) + self.num_closing

    @property
    def num_before(self) -> int:
        """Documents that keep it busy or wait for it."""
        return len(self.leases) + self.may_hang

    def queued(self) -> _Held | None:
        """The longest of its leases that wait."""
        waiting = [held for held in self.leases.values() if held.is_queued]
        return max(waiting, key=lambda held: held.lease.num_tokens, default=None)


class Scheduler:
    """Leases documents to workers, longest first."""

    def __init__(
        self, documents: Iterable[tuple[DocumentKey, int]], limits: Limits, leases_per_worker: int, stem: str = ""
    ) -> None:
        """`documents`: keys, each once, with their estimated tokens. `stem` begins every lease id."""
        self._limits = limits
        self._leases_per_worker = leases_per_worker
        self._stem = stem
        self._fresh: list[tuple[int, DocumentKey]] = []
        self._alone: list[tuple[int, DocumentKey]] = []
        self._later: list[tuple[float, DocumentKey]] = []
        self._items: dict[DocumentKey, _Item] = {}
        self._held: dict[str, _Held] = {}
        self._workers: dict[str, _Worker] = {}
        for key, num_tokens in documents:
            assert key not in self._items, f"{key} twice"
            self._items[key] = _Item(key, num_tokens)
            self._fresh.append(_rank(num_tokens, key))
        heapq.heapify(self._fresh)

    @property
    def num_open(self) -> int:
        """Documents neither finished nor given up."""
        return len(self._items)

    @property
    def num_waiting(self) -> int:
        """Open documents that no worker holds."""
        return len(self._fresh) + len(self._alone) + len(self._later)

    @property
    def is_done(self) -> bool:
        """Nothing is open."""
        return not self._items

    def join(self, worker: str, now: float) -> None:
        """A worker is ready for leases."""
        assert worker not in self._workers, f"{worker} joined twice"
        self._workers[worker] = _Worker(moved_at=now)

    def assign(self, now: float) -> list[tuple[str, Lease]]:
        """Leases to hand out now: charged documents alone on empty workers, the others longest first, spread."""
        granted = []
        while self._later and self._later[0][0] <= now:
            self._enqueue(self._items[heapq.heappop(self._later)[1]])
        takers = self._takers(now)
        for name, worker in takers.items():
            if self._alone and worker.is_empty:
                worker.alone = True
                granted.append((name, self._grant(name, heapq.heappop(self._alone)[1], now)))
        while self._fresh and (roomiest := self._roomiest(takers)) is not None:
            granted.append((roomiest, self._grant(roomiest, heapq.heappop(self._fresh)[1], now)))
        return granted

    def _takers(self, now: float) -> dict[str, _Worker]:
        """Workers that may get leases."""
        return {
            name: worker for name, worker in self._workers.items() if worker.takes_leases and worker.blind_until <= now
        }

    def rebalance(self, now: float) -> tuple[str, Lease] | None:
        """A lease taken back from the queue of a slow worker, and that worker: `assign` gives it to an idle one.

        Only at the end, when no document waits here. The idle worker has no queue, and two leases less than the slow
        one, so no lease goes to and fro. It costs no attempt. Call `closed` when the slow worker has let go of it.
        """
        if self._fresh or self._alone or (held := self._misplaced(now)) is None:
            return None
        self._workers[held.worker].num_closing += 1
        self._release(held.lease.lease_id)
        self._enqueue(held.item)
        return held.worker, held.lease

    def suspend(self, worker: str) -> None:
        """Hand nothing more to a worker that is gone, until `leave` or `lose` says what that means."""
        self._workers[worker].takes_leases = False

    def report(self, worker: str, num_steps: int, started: Iterable[str], now: float) -> None:
        """A worker's step counter, and its leases whose prefill has begun; its others wait."""
        if (state := self._workers.get(worker)) is None:
            return
        if num_steps != state.num_steps:
            state.num_steps, state.moved_at = num_steps, now
        begun = set(started)
        for lease_id, held in state.leases.items():
            held.is_queued = held.started_at is None and lease_id not in begun
            if held.started_at is None and lease_id in begun:
                held.started_at = now
                state.pause_s = PAUSE_S

    def lease(self, lease_id: str) -> Lease | None:
        """The lease, while it is in force."""
        held = self._held.get(lease_id)
        return held.lease if held is not None else None

    def leased(self) -> list[DocumentKey]:
        """Documents that workers hold."""
        return [held.lease.key for held in self._held.values()]

    def waiting(self) -> list[DocumentKey]:
        """Open documents that no worker holds, in the order in which they will be leased."""
        return [key for _, key in [*sorted(self._alone), *sorted(self._fresh), *sorted(self._later)]]

    def holder(self, lease_id: str) -> str:
        """The worker that holds a lease in force."""
        return self._held[lease_id].worker

    def finish(self, lease_id: str) -> bool:
        """Close the document of this lease; False where the lease was taken away, so its result must be dropped."""
        held = self._release(lease_id)
        if held is None:
            return False
        self._workers[held.worker].pause_s = PAUSE_S
        del self._items[held.item.key]
        return True

    def overdue(self, now: float) -> list[Lease]:
        """Leases past their document's deadline."""
        base, per_token = self._limits.deadline_base_s, self._limits.deadline_s_per_token
        return [
            held.lease
            for held in self._held.values()
            if held.started_at is not None and now - held.started_at > base + per_token * held.lease.num_tokens
        ]

    def expire(self, lease_id: str, message: str) -> list[GivenUp]:
        """Take an overdue lease back and charge its document. Call `closed` when the worker has let go of it."""
        worker = self._workers[self._held[lease_id].worker]
        worker.num_closing += 1
        worker.expired_at_step = worker.num_steps
        held = self._release(lease_id)
        assert held is not None
        return self._charge(held.item, "DeadlineExceeded", message, is_certain=True)

    def blame(self, lease_id: str, error_class: str, message: str) -> list[GivenUp]:
        """Its batch failed, and perhaps by its fault: charge the document of a lease in force."""
        held = self._release(lease_id)
        assert held is not None
        return self._charge(held.item, error_class, message, is_certain=False)

    def unread(self, lease_id: str, now: float) -> float:
        """Its worker could not read it, others may: it waits again, uncharged; the seconds that the worker waits."""
        held = self._release(lease_id)
        assert held is not None
        self._enqueue(held.item)
        worker = self._workers[held.worker]
        if worker.blind_until <= now:
            worker.blind_until = now + worker.pause_s
            worker.pause_s = min(2 * worker.pause_s, LONGEST_PAUSE_S)
        if all(other.started_at is None for other in worker.leases.values()):
            worker.moved_at = now  # it has answered, and nothing that it decodes may hang
        return worker.blind_until - now

    def damaged(self, lease_id: str, error_class: str, message: str, now: float) -> list[GivenUp]:
        """Nobody can read it: charge the document of a lease in force, and let it wait for `PAUSE_S`."""
        held = self._release(lease_id)
        assert held is not None
        held.item.attempts += 1
        if held.item.attempts >= self._limits.max_attempts:
            return [self._give_up(held.item, error_class, message)]
        heapq.heappush(self._later, (now + PAUSE_S, held.item.key))
        return []

    def is_blind(self, worker: str, now: float) -> bool:
        """Whether a worker waits because it could not read a document."""
        return self._workers[worker].blind_until > now

    def take_back(self, lease_id: str, message: str) -> list[GivenUp]:
        """The call was lost for no fault of the document: it waits again, as if its node had died."""
        held = self._release(lease_id)
        return [] if held is None else self._count_loss(held.item, message)

    def closed(self, worker: str) -> None:
        """The call of a lease taken back has returned."""
        if (state := self._workers.get(worker)) is not None:
            state.num_closing -= 1
            assert state.num_closing >= 0

    def stalled(self, now: float) -> list[str]:
        """Workers that hold leases and have made no step for `stall_s`."""
        return [
            name
            for name, worker in self._workers.items()
            if worker.takes_leases and not worker.is_empty and now - worker.moved_at > self._limits.stall_s
        ]

    def leave(self, worker: str, error_class: str, message: str) -> list[GivenUp]:
        """A worker died: charge what it had started, free the rest.

        A document that ran alone is charged even when the worker died before it could say that it had started,
        unless the worker made no step since it was told to drop another one: then that one may be what hangs.
        """
        state = self._drop(worker)
        certain = state.alone and not state.may_hang
        given_up = []
        for held in state.leases.values():
            if held.started_at is not None or certain:
                given_up += self._charge(held.item, error_class, message, is_certain=state.alone)
            else:
                self._expose(held.item)
        return given_up

    def lose(self, worker: str, message: str) -> list[GivenUp]:
        """A worker went down with its node: nobody is charged."""
        leases = self._drop(worker).leases.values()
        return [given_up for held in leases for given_up in self._count_loss(held.item, message)]

    def _drop(self, worker: str) -> _Worker:
        state = self._workers.pop(worker)
        for lease_id in state.leases:
            del self._held[lease_id]
        return state

    def _grant(self, worker: str, key: DocumentKey, now: float) -> Lease:
        item, state = self._items[key], self._workers[worker]
        item.num_leases += 1
        lease_id = f"{self._stem}{key.file}-{key.row}-{item.num_leases}"
        held = _Held(Lease(lease_id, key, item.num_tokens, item.attempts + 1), item, worker)
        if state.is_empty:
            state.moved_at = now
        self._held[lease_id] = state.leases[lease_id] = held
        return held.lease

    def _roomiest(self, takers: dict[str, _Worker]) -> str | None:
        held = {name: worker.num_taken for name, worker in takers.items() if not worker.alone}
        name = min(held, key=held.__getitem__, default=None)
        return name if name is not None and held[name] < self._leases_per_worker else None

    def _misplaced(self, now: float) -> _Held | None:
        """The longest lease that waits at the busiest worker, if another one is idle."""
        takers = [worker for worker in self._takers(now).values() if not worker.alone]
        slow = max((worker for worker in takers if worker.queued()), key=lambda each: each.num_before, default=None)
        idle = min((worker.num_taken for worker in takers if not worker.queued()), default=self._leases_per_worker)
        if slow is None or idle >= self._leases_per_worker or slow.num_before < idle + 2:
            return None
        return slow.queued()

    def _release(self, lease_id: str) -> _Held | None:
        held = self._held.pop(lease_id, None)
        if held is not None:
            worker = self._workers[held.worker]
            del worker.leases[lease_id]
            worker.alone = worker.alone and bool(worker.leases)
        return held

    def _charge(self, item: _Item, error_class: str, message: str, *, is_certain: bool) -> list[GivenUp]:
        """Not `is_certain`: a neighbour may be to blame, so the last attempt is left for the document alone."""
        if not is_certain and item.attempts + 1 == self._limits.max_attempts:
            item.exposures = MAX_UNCHARGED_EXPOSURES
            self._enqueue(item)
            return []
        item.attempts += 1
        item.strikes += 1
        if item.attempts >= self._limits.max_attempts:
            return [self._give_up(item, error_class, message)]
        self._enqueue(item)
        return []

    def _count_loss(self, item: _Item, message: str) -> list[GivenUp]:
        item.losses += 1
        if item.losses >= self._limits.max_losses:
            return [self._give_up(item, "NodeLost", message)]
        self._enqueue(item)
        return []

    def _expose(self, item: _Item) -> None:
        item.exposures += 1
        self._enqueue(item)

    def _enqueue(self, item: _Item) -> None:
        heapq.heappush(self._alone if item.runs_alone else self._fresh, _rank(item.num_tokens, item.key))

    def _give_up(self, item: _Item, error_class: str, message: str) -> GivenUp:
        del self._items[item.key]
        return GivenUp(item.key, max(item.attempts, 1), error_class, message)


def _rank(num_tokens: int, key: DocumentKey) -> tuple[int, DocumentKey]:
    """Longest first, by and large. Those of about one length in input order: a worker reads whole row groups, and one
    whose rows were asked for from one end of the run to the other would be read once for every row.
    """
    return -round(math.log(max(1, num_tokens), LENGTH_STEP)), key
