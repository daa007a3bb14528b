"""The workers of a run and the leases that they hold: the record by which the scheduler decides. Pure.

A lease is in force from `grant` until it is released or its worker is dropped. Times are seconds of any monotonic clock
that the caller passes in.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from specextend.cluster.leases import PAUSE_S, Held, Item, Lease, Limits
from specextend.cluster.places import Place

LONGEST_PAUSE_S = 600.0
"""Longest pause of a worker that cannot read a file: it doubles as long as the worker reads nothing of that file."""
MAX_UNREAD_FILES = 1
"""Files that a worker may fail to read in a row before it gets no documents at all."""


@dataclass(slots=True)
class Pause:
    """Back-off that doubles up to ten minutes."""

    until: float = -math.inf
    next_s: float = PAUSE_S

    def begin(self, now: float) -> float:
        """Begin a pause unless one is under way. Returns the seconds until its end."""
        if self.until <= now:
            self.until = now + self.next_s
            self.next_s = min(2 * self.next_s, LONGEST_PAUSE_S)
        return self.until - now


@dataclass(slots=True)
class Holder:
    """A worker and the leases that it holds."""

    place: Place
    number: int
    """In the order in which workers joined."""
    rests_until: float = -math.inf
    leases: dict[str, Held] = field(default_factory=dict)
    alone: bool = False
    """True while it holds one document that runs alone."""
    is_reserved: bool = False
    """True while it gets no more documents, because one that runs alone waits for it to run empty."""
    takes_leases: bool = True
    is_draining: bool = False
    """True once its node is about to go."""
    is_trusted: bool = True
    """True if its death says something about its documents; settled once it takes no leases any more."""
    num_closing: int = 0
    """Leases taken back whose call has not returned yet."""
    expired_at_step: int | None = None
    """The step counter when a lease was last taken back: until it moves, the engine may still hang in that one."""
    num_steps: int = -1
    moved_at: float = 0.0
    blind: dict[int | None, Pause] = field(default_factory=dict)
    """Files that it could not read; None: any."""
    unread_files: set[int] = field(default_factory=set)
    """Those of them that it could not read since it last read something."""

    @property
    def distance(self) -> tuple[bool, bool, int]:
        """Return how far it is from running empty, as a key to sort by."""
        return not self.is_empty, not self.is_reserved, self.num_taken

    def blind_to(self, now: float) -> set[int | None]:
        """Select the files of which it gets no documents now."""
        return {file for file, pause in self.blind.items() if pause.until > now}

    def sees(self, file: int, now: float) -> bool:
        """Return True if it may get a document of a file."""
        return self.blind_to(now).isdisjoint((file, None))

    def has_read(self, file: int) -> None:
        """Note that it has read a document of a file."""
        if self.blind:
            self.unread_files.clear()
            self.blind.pop(file, None)
            self.blind.pop(None, None)

    def could_not_read(self, file: int, now: float) -> float:
        """Note that it could not read a file. Returns the seconds until it gets documents of that file again."""
        self.unread_files.add(file)
        lost: list[int | None] = [file]
        if len(self.unread_files) > MAX_UNREAD_FILES:
            lost.append(None)
        return max(self.blind.setdefault(each, Pause()).begin(now) for each in lost)

    @property
    def is_empty(self) -> bool:
        """Return True if it holds no lease, not even one that is being taken back."""
        return not self.leases and not self.num_closing

    @property
    def may_hang(self) -> bool:
        """Return True if it may still be busy with a lease that was taken back."""
        return self.expired_at_step is not None and self.expired_at_step == self.num_steps

    @property
    def holds_struck(self) -> bool:
        """Return True if every document that it holds was struck elsewhere, too: that explains its death."""
        return bool(self.leases) and all(held.item.struck - {self.place.spot} for held in self.leases.values())

    @property
    def num_taken(self) -> int:
        """Count its leases, those being taken back included."""
        return len(self.leases) + self.num_closing

    @property
    def num_before(self) -> int:
        """Count the documents that keep it busy or wait for it."""
        return len(self.leases) + self.may_hang

    @property
    def has_queue(self) -> bool:
        """Return True if a lease waits there whose prefill has not begun."""
        return any(held.is_queued for held in self.leases.values())

    def queue(self) -> list[Held]:
        """List its leases whose prefill has not begun, the longest last."""
        waiting = [held for held in self.leases.values() if held.is_queued]
        return sorted(waiting, key=lambda held: held.lease.num_tokens)


class LeaseTable:
    """The workers that there are, and the leases in force by their ids."""

    def __init__(self, limits: Limits, leases_per_worker: int, stem: str) -> None:
        """Take the limits of a document's time. stem: the beginning of every lease id."""
        self._limits, self._leases_per_worker, self._stem = limits, leases_per_worker, stem
        self.workers: dict[str, Holder] = {}
        self.idle: dict[str, float] = {}
        """The workers without a lease, and since when; who has been idle longest comes first."""
        self.roomy: dict[str, None] = {}
        """The workers that do not hold as many leases as they may."""
        self.num_not_started = 0
        """Number of leases whose prefill has not begun."""
        self.now = 0.0
        """The time that was passed last."""
        self._held: dict[str, Held] = {}
        self._deadlines: list[tuple[float, str]] = []
        """Heap of deadlines and lease ids; leases that have ended may be among them."""
        self._num_granted, self._num_joined = itertools.count(1), itertools.count(1)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._held

    def __getitem__(self, lease_id: str) -> Held:
        return self._held[lease_id]

    def leases(self) -> list[Lease]:
        """List the leases in force."""
        return [held.lease for held in self._held.values()]

    def join(self, worker: str, place: Place, rest_s: float, now: float) -> None:
        """Add a worker, which rests for so many seconds before it takes a lease."""
        assert worker not in self.workers, f"{worker} joined twice"
        self.workers[worker] = Holder(place, next(self._num_joined), now + rest_s, moved_at=now)
        self.roomy[worker] = None
        self.idle[worker] = now

    def grant(self, worker: str, item: Item, now: float) -> Lease:
        """Lease a document to a worker."""
        state, key = self.workers[worker], item.key
        lease_id = f"{self._stem}{key.file}-{key.row}-{next(self._num_granted)}"
        lease = Lease(lease_id, key, item.num_tokens, item.attempts + 1, item.runs_alone)
        if state.is_empty:
            state.moved_at = now
            self.idle.pop(worker, None)
        self._held[lease_id] = state.leases[lease_id] = Held(lease, item, worker)
        self.num_not_started += 1
        self._note_room(worker)
        return lease

    def release(self, lease_id: str) -> Held:
        """End a lease in force and return it."""
        held = self._held.pop(lease_id)
        worker = self.workers[held.worker]
        del worker.leases[lease_id]
        worker.alone = worker.alone and bool(worker.leases)
        self.num_not_started -= held.started_at is None
        self._note_room(held.worker)
        return held

    def call_back(self, lease_id: str) -> Held:
        """End a lease whose call has not returned; the worker counts it until `closed`."""
        self.workers[self._held[lease_id].worker].num_closing += 1
        return self.release(lease_id)

    def closed(self, worker: str) -> None:
        """Note that the call of a lease taken back has returned."""
        if (state := self.workers.get(worker)) is not None:
            state.num_closing -= 1
            assert state.num_closing >= 0
            self._note_room(worker)

    def drop(self, worker: str) -> Holder:
        """Remove a worker; return it with its leases, which are no longer in force."""
        state = self.workers.pop(worker)
        self.idle.pop(worker, None)
        self.roomy.pop(worker, None)
        for lease_id, held in state.leases.items():
            del self._held[lease_id]
            self.num_not_started -= held.started_at is None
        return state

    def report(self, worker: str, num_steps: int, started: Iterable[str], now: float) -> None:
        """Note a worker's step counter and its leases whose prefill has begun; its other leases wait."""
        self.now = now
        if (state := self.workers.get(worker)) is None:
            return
        if num_steps != state.num_steps:
            state.num_steps, state.moved_at = num_steps, now
        begun = set(started)
        for lease_id, held in state.leases.items():
            held.is_queued = held.started_at is None and lease_id not in begun
            if held.started_at is None and lease_id in begun:
                held.started_at = now
                self.num_not_started -= 1
                heapq.heappush(self._deadlines, (now + self._limits.seconds_for(held.lease.num_tokens), lease_id))
                state.has_read(held.item.key.file)

    def overdue(self, now: float) -> list[Lease]:
        """List the leases past their document's deadline."""
        late = []
        while self._deadlines and self._deadlines[0][0] < now:
            late.append(heapq.heappop(self._deadlines))
        late = [entry for entry in late if entry[1] in self._held]
        for entry in late:
            heapq.heappush(self._deadlines, entry)
        return [self._held[lease_id].lease for _, lease_id in late]

    def _note_room(self, worker: str) -> None:
        """Note whether a worker has room for a lease, and whether it is idle."""
        state = self.workers[worker]
        if state.num_taken < self._leases_per_worker:
            self.roomy[worker] = None
        else:
            self.roomy.pop(worker, None)
        if state.is_empty:
            self.idle.setdefault(worker, self.now)
