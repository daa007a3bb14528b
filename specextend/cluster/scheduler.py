"""The scheduler assigns documents to workers and charges documents for failures. Pure.

Times are seconds of any monotonic clock. A document is open until `finish` or a `GivenUp`. Rules:

- Neighbouring rows go to the same worker, the longest documents first (`Backlog`).
- A document suspected of a failure runs alone, if possible at another place.
- A place where workers die gets a single document at a time until a document is finished there.
  After `MAX_DEATHS` deaths in a row the place is left out, unless all others are as bad.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from specextend.cluster.backlog import Backlog, Estimates, Rank, rank
from specextend.cluster.messages import Lease, Place, Tried
from specextend.core import DocumentKey
from specextend.data.inputs import DocumentError

if TYPE_CHECKING:  # it imports torch
    from specextend.config import JobOptions

MAX_LOSSES = 10
"""Uncharged leases a document may lose, with a node or before a reported start."""
LOSSES_ALONE = 2
"""Lost leases after which a document runs alone."""
MAX_DEATHS = 6
"""Consecutive deaths at a place before it is left out."""
ALONE_SHARE = 4
"""A quarter of the workers is reserved for documents that run alone."""
IDLE_S = 60.0
"""Seconds until an idle superfluous worker is released."""
PAUSE_S = 10.0
"""Seconds of rest after a failed read."""


class GivenUp(NamedTuple):
    """A document to be reported as an error row."""

    key: DocumentKey
    attempts: int
    error: DocumentError
    worker: str


@dataclass(slots=True)
class OpenDocument:
    """A leased document, or a document with a history."""

    key: DocumentKey
    attempts: int = 0
    forgiven: int = 0
    struck: set[Place] = field(default_factory=set)
    """Places of failed workers and batches."""
    losses: int = 0

    @property
    def runs_alone(self) -> bool:
        """Return True if the document may cause its neighbours to fail."""
        return bool(self.struck) or self.losses >= LOSSES_ALONE


@dataclass(slots=True, eq=False)
class Holder:
    """A worker and its leases."""

    name: str
    place: Place
    moved_at: float
    leases: dict[str, HeldLease] = field(default_factory=dict)
    num_closing: int = 0
    """Cancelled calls still in progress."""
    num_steps: int = -1
    rests_until: float = -math.inf
    is_alone: bool = False
    is_draining: bool = False

    @property
    def is_empty(self) -> bool:
        """Return True without leases, cancelled or not."""
        return not self.num_taken

    @property
    def num_taken(self) -> int:
        """Count the leases, cancelled or not."""
        return len(self.leases) + self.num_closing

    @property
    def holds_struck(self) -> bool:
        """Return True if all its documents were struck elsewhere too, which explains a death."""
        return bool(self.leases) and all(
            held.document.struck - {self.place} for held in self.leases.values()
        )


@dataclass(slots=True)
class HeldLease:
    """A lease in force."""

    lease: Lease
    document: OpenDocument
    worker: Holder
    started_at: float | None = None
    num_outputs: int | None = None
    """None before prefill."""


class Scheduler:
    """Leases documents to workers, by neighbourhood and longest first."""

    def __init__(
        self,
        estimates: Estimates,
        job: JobOptions,
        leases_per_worker: int,
        stem: str = "",
        tried: Mapping[DocumentKey, Tried] | None = None,
        group_rows: Sequence[Sequence[int]] = (),
        num_extra: int = 0,
    ):
        """Queue the documents.

        Args:
            stem: Prefix of all lease ids.
            tried: Attempts of earlier starts.
            group_rows: Rows of each row group, per file.
            num_extra: Leases beyond a worker's batch, except near the end.
        """
        self._job = job
        self.num_open = len(estimates)
        self._estimates = estimates
        self._stem = stem
        self._leases_per_worker = leases_per_worker
        self._num_extra = num_extra
        self._documents = {
            key: OpenDocument(key, before.attempts, before.forgiven, set(before.struck))
            for key, before in (tried or {}).items()
            if key in estimates
        }
        apart = [document for document in self._documents.values() if document.runs_alone]
        self._backlog = Backlog(estimates, group_rows, [document.key for document in apart])
        self._alone: list[Rank] = []
        for document in apart:
            self._put_back(document)
        self._has_charged = False
        self.given_up: list[GivenUp] = []
        """Future error rows; the driver empties the list."""
        self.workers: dict[str, Holder] = {}
        self.held: dict[str, HeldLease] = {}
        self._num_granted = itertools.count(1)
        self._deaths: Counter[Place] = Counter()
        """Unexplained deaths since the last finished document."""
        self._last_words: dict[Place, str] = {}
        self._left_out: set[Place] = set()
        self._num_coming = 0

    @property
    def num_waiting(self) -> int:
        """Count the open documents without a worker."""
        return len(self._backlog) + len(self._alone)

    @property
    def is_done(self) -> bool:
        """Return True if no document is open."""
        return not self.num_open

    @property
    def num_wanted(self) -> int:
        """Count the workers that are busy or can take a waiting document.

        Each place that may be at fault for a death adds a worker.
        """
        workers = self.workers.values()
        useful = min(
            self.num_open, self.num_waiting + sum(not worker.is_empty for worker in workers)
        )
        struck = {place for _, key in self._alone for place in self._documents[key].struck}
        return useful + sum(
            self._deaths[worker.place] > 0 or worker.place in struck for worker in workers
        )

    def first_waiting(self, limit: int) -> list[DocumentKey]:
        """List up to `limit` waiting documents, those that run alone first."""
        return [*(key for _, key in self._alone), *self._backlog.first(limit)][:limit]

    def running(self) -> list[tuple[int, int, int]]:
        """List prompt tokens, maximum and current output tokens in engines.

        All three are 0 before decoding starts.
        """
        return [
            (*held.lease.estimate, held.num_outputs) if held.num_outputs else (0, 0, 0)
            for held in self.held.values()
            if held.num_outputs is not None
        ]

    def charges(self) -> dict[DocumentKey, Tried] | None:
        """Return the attempts at open documents after failures; None if unchanged."""
        if not self._has_charged:
            return None
        self._has_charged = False
        struck = (document for document in self._documents.values() if document.struck)
        return {
            document.key: Tried(document.attempts, frozenset(document.struck))
            for document in struck
        }

    def expect(self, num_coming: int) -> None:
        """Set the number of workers being built. Documents struck everywhere else wait for them."""
        self._num_coming = num_coming

    def join(self, worker: str, place: Place, now: float) -> tuple[int, str] | None:
        """Add a ready worker, or return the deaths and last reason if its place is left out."""
        assert worker not in self.workers, f"{worker} joined twice"
        self.workers[worker] = Holder(worker, place, now)
        others = {other.place for other in self.workers.values()} - {place} - self._left_out
        if self._deaths[place] >= MAX_DEATHS and any(
            self._deaths[other] < self._deaths[place] for other in others
        ):
            self._left_out.add(place)
        return (self._deaths[place], self._last_words[place]) if place in self._left_out else None

    def report(self, worker: str, num_steps: int, outputs: Mapping[str, int], now: float) -> bool:
        """Record a worker's steps and output tokens by lease; return True after a step."""
        state = self.workers[worker]
        has_moved = num_steps > max(0, state.num_steps)
        if num_steps != state.num_steps:
            state.num_steps = num_steps
            state.moved_at = now
        for lease_id, held in state.leases.items():
            held.num_outputs = outputs.get(lease_id)
            if held.started_at is None and held.num_outputs is not None:
                held.started_at = now
        return has_moved

    def assign(self, now: float) -> list[tuple[str, Lease]]:
        """Grant all due leases: empty workers for documents that run alone, the rest spread."""
        if not self.num_waiting:
            return []
        takers = [worker for worker in self.workers.values() if self._takes(worker, now)]
        return [*self._assign_alone(takers, now), *self._assign_fresh(takers, now)]

    def _takes(self, worker: Holder, now: float) -> bool:
        is_ready = not (worker.is_draining or worker.is_alone)
        return is_ready and worker.rests_until <= now and worker.place not in self._left_out

    def _assign_alone(self, takers: list[Holder], now: float) -> list[tuple[str, Lease]]:
        """Grant documents to empty workers, or reserve the emptiest; take these from `takers`."""
        granted: list[tuple[str, Lease]] = []
        room = max(1, len(self.workers) // ALONE_SHARE) if len(self._backlog) else len(self.workers)
        room -= sum(worker.is_alone for worker in self.workers.values())
        takers.sort(key=lambda worker: worker.num_taken)
        allowed: dict[frozenset[Place], set[Place]] = {}
        for entry in list(self._alone):
            if room <= 0:
                break
            document = self._documents[entry[1]]
            struck = frozenset(document.struck)
            if struck not in allowed:
                allowed[struck] = self._places_for(struck)
            places = allowed[struck]
            worker = next((each for each in takers if each.place in places), None)
            if worker is None:
                continue
            room -= 1
            takers.remove(worker)
            if worker.is_empty:
                self._alone.remove(entry)
                granted.append((worker.name, self._grant(worker, document.key, now)))
                worker.is_alone = True
        return granted

    def _places_for(self, struck: frozenset[Place]) -> set[Place]:
        """Prefer other hosts, then other places, then fewest deaths."""
        hosts = {place.host for place in struck}
        known = {worker.place for worker in self.workers.values()} - self._left_out
        allowed = {place for place in known if place.host not in hosts}
        allowed = allowed or known - struck
        if not allowed and not self._num_coming:
            allowed = known
        fewest = min((self._deaths[place] for place in allowed), default=0)
        return {place for place in allowed if self._deaths[place] == fewest}

    def _assign_fresh(self, takers: Sequence[Holder], now: float) -> list[tuple[str, Lease]]:
        is_near_end = len(self._backlog) < self._num_extra * len(self.workers)
        most = self._leases_per_worker - self._num_extra * is_near_end
        room = {worker.name: 1 if self._deaths[worker.place] else most for worker in takers}
        free = [
            (worker.num_taken, worker.name)
            for worker in takers
            if worker.num_taken < room[worker.name]
        ]
        heapq.heapify(free)
        granted = []
        while free and (key := self._backlog.take(free[0][1])) is not None:
            num_taken, name = heapq.heappop(free)
            granted.append((name, self._grant(self.workers[name], key, now)))
            if num_taken + 1 < room[name]:
                heapq.heappush(free, (num_taken + 1, name))
        return granted

    def _grant(self, worker: Holder, key: DocumentKey, now: float) -> Lease:
        if (document := self._documents.get(key)) is None:
            document = self._documents[key] = OpenDocument(key)
        lease_id = f"{self._stem}{key.file}-{key.row}-{next(self._num_granted)}"
        estimate = self._estimates[key]
        lease = Lease(lease_id, key, estimate, document.attempts + 1, document.runs_alone)
        if worker.is_empty:
            worker.moved_at = now
        self.held[lease_id] = worker.leases[lease_id] = HeldLease(lease, document, worker)
        return lease

    def finish(self, lease_id: str) -> None:
        """Close a finished document."""
        held = self._release(lease_id)
        del self._deaths[held.worker.place]
        self._close(held.document)

    def reject(self, lease_id: str, error: DocumentError) -> None:
        """Give up a document that failed by itself."""
        held = self._release(lease_id)
        held.document.attempts += 1
        self._give_up(held, error)

    def seconds_for(self, lease: Lease) -> float:
        """Return the seconds from the start of prefill to the deadline."""
        return self._job.document_deadline_s * (1 + lease.estimate.total / 1000)

    def overdue(self, now: float) -> list[HeldLease]:
        """List the overdue leases."""
        return [
            held
            for held in self.held.values()
            if held.started_at is not None and now - held.started_at > self.seconds_for(held.lease)
        ]

    def expire(self, lease_id: str, message: str) -> None:
        """Cancel an overdue lease and charge its document; `closed` follows."""
        error = _failure("DeadlineExceeded", message)
        self._charge(self._call_back(lease_id), error, is_certain=True)

    def blame(self, lease_id: str, error: DocumentError) -> None:
        """Charge a document after a failed batch, or because nobody can read it."""
        held = self._release(lease_id)
        self._charge(held, error, is_certain=held.lease.is_alone or error.stage == "read")

    def unread(self, lease_id: str, now: float) -> None:
        """Return an unread document. The worker rests for `PAUSE_S`."""
        held = self._release(lease_id)
        self._put_back(held.document)
        worker = held.worker
        worker.rests_until = now + PAUSE_S
        if all(other.started_at is None for other in worker.leases.values()):
            worker.moved_at = now  # an answer shows that it does not hang

    def take_back(self, lease_id: str, message: str) -> None:
        """Return a document after a lost call, as if the node had died."""
        self._count_loss(self._release(lease_id), message)

    def closed(self, worker: str) -> None:
        """Record the return of a cancelled call."""
        state = self.workers[worker]
        state.num_closing -= 1
        assert state.num_closing >= 0

    def drain(self, worker: str) -> list[Lease]:
        """Stop a worker whose node is about to go; return its leases that had not started.

        Nothing is counted against these. Call `closed` for each returned call.
        """
        state = self.workers[worker]
        state.is_draining = True
        waiting = [held.lease for held in state.leases.values() if held.started_at is None]
        for lease in waiting:
            self._put_back(self._call_back(lease.lease_id).document)
        self._backlog.leave(worker)
        return waiting

    def spare(self, now: float) -> list[str]:
        """List workers to release: empty draining ones, and superfluous idle ones."""
        empty = [worker for worker in self.workers.values() if worker.is_empty]
        draining = [worker.name for worker in empty if worker.is_draining]
        idle = [
            worker.name
            for worker in empty
            if now - worker.moved_at >= IDLE_S
            and not worker.is_draining
            and worker.place not in self._left_out
        ]
        surplus = len(self.workers) - len(draining) - self.num_wanted
        return draining + idle[: max(0, surplus)]

    def release(self, worker: str) -> None:
        """Remove a released worker."""
        assert self._drop(worker).is_empty, f"{worker} is at work"

    def stalled(self, now: float) -> list[str]:
        """List workers with leases but without a step for `stall_s`."""
        return [
            name
            for name, worker in self.workers.items()
            if not worker.is_empty and now - worker.moved_at > self._job.stall_s
        ]

    def leave(self, worker: str, error_class: str, message: str) -> None:
        """Remove a dead worker: charge the documents it had started and return the others.

        A document that ran alone is charged even if its start was never reported.
        """
        state = self._drop(worker)
        if not state.holds_struck:
            self._deaths[state.place] += 1
            self._last_words[state.place] = message
        for held in state.leases.values():
            if held.started_at is None and not state.is_alone:
                self._count_loss(held, message)
            else:
                self._charge(held, _failure(error_class, message), is_certain=state.is_alone)

    def lose(self, worker: str, message: str) -> None:
        """Remove a worker lost with its node, without charges; nor is an announced loss counted."""
        state = self._drop(worker)
        for held in state.leases.values():
            if state.is_draining:
                self._put_back(held.document)
            else:
                self._count_loss(held, message)

    def _release(self, lease_id: str) -> HeldLease:
        held = self.held.pop(lease_id)
        worker = held.worker
        del worker.leases[lease_id]
        worker.is_alone = worker.is_alone and bool(worker.leases)
        return held

    def _call_back(self, lease_id: str) -> HeldLease:
        """End a lease whose call occupies the worker until `closed`."""
        self.held[lease_id].worker.num_closing += 1
        return self._release(lease_id)

    def _drop(self, worker: str) -> Holder:
        self._backlog.leave(worker)
        state = self.workers.pop(worker)
        for lease_id in state.leases:
            del self.held[lease_id]
        return state

    def _put_back(self, document: OpenDocument) -> None:
        if document.runs_alone:
            bisect.insort(self._alone, rank(self._estimates[document.key].total, document.key))
            return
        if not (document.attempts or document.losses or document.struck):
            del self._documents[document.key]
        self._backlog.put(document.key)

    def _charge(self, held: HeldLease, error: DocumentError, *, is_certain: bool) -> None:
        """Charge a document. It runs alone from now on, unless only reading failed.

        An uncertain charge never takes the last attempt, which is kept for a run alone.
        """
        document = held.document
        was_decoded = error.stage != "read"
        if was_decoded:
            document.struck.add(held.worker.place)
        most = self._job.max_attempts + document.forgiven
        if is_certain or document.attempts + 1 < most:
            document.attempts += 1
        if document.attempts >= most:
            self._give_up(held, error)
        else:
            self._has_charged |= was_decoded
            self._put_back(document)

    def _count_loss(self, held: HeldLease, message: str) -> None:
        held.document.losses += 1
        if held.document.losses >= MAX_LOSSES:
            self._give_up(held, _failure("NodeLost", message))
        else:
            self._put_back(held.document)

    def _give_up(self, held: HeldLease, error: DocumentError) -> None:
        document = held.document
        self._close(document)
        attempts = max(document.attempts, 1)
        self.given_up.append(GivenUp(document.key, attempts, error, held.worker.name))

    def _close(self, document: OpenDocument) -> None:
        del self._documents[document.key]
        self.num_open -= 1


def _failure(error_class: str, message: str) -> DocumentError:
    return DocumentError(error_class, message, "decode", retryable=True)
