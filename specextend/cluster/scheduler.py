"""The scheduler: which worker gets which document, and which documents a failure charges. Pure.

It has no Ray, no files and no clock of its own: times are seconds of any monotonic clock that the
caller passes in. A document is open until `finish` or a `GivenUp` closes it; at most one worker
holds its lease at a time.

- Neighbouring rows go to one worker, the longest documents first (`Backlog`).
- A document that may have failed its neighbours runs alone, and elsewhere if it can.
- A place where workers die gets one document at a time until one is done there. After `MAX_DEATHS`
  deaths in a row it gets none any more, if another place has had fewer.
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
"""Leases that a document may lose uncharged, with a node or with a worker that it is not known to
have started at.
"""
LOSSES_ALONE = 2
"""Such losses after which a document runs alone."""
MAX_DEATHS = 6
"""Deaths of workers at one place in a row, without a document done between, before it is left
out.
"""
ALONE_SHARE = 4
"""One worker in this many, and at least one, may be kept for documents that run alone while others
wait.
"""
IDLE_S = 60.0
"""Seconds without a lease and a step after which a worker is let go that is of no use any more."""
PAUSE_S = 10.0
"""Seconds before a worker that could not read a document gets another."""


class GivenUp(NamedTuple):
    """A document that becomes an error row."""

    key: DocumentKey
    attempts: int
    error: DocumentError
    worker: str
    """The one that had it last."""


@dataclass(slots=True)
class OpenDocument:
    """A document that is leased, or of which there is something to remember."""

    key: DocumentKey
    attempts: int = 0
    forgiven: int = 0
    """Attempts that do not count towards `max_attempts`."""
    struck: set[Place] = field(default_factory=set)
    """The places where it was held when a worker or a batch failed, charged or not."""
    losses: int = 0

    @property
    def num_counted(self) -> int:
        """Count the attempts that count towards `max_attempts`."""
        return self.attempts - self.forgiven

    @property
    def runs_alone(self) -> bool:
        """Return True if its next failure may fail its neighbours, too."""
        return bool(self.struck) or self.losses >= LOSSES_ALONE


@dataclass(slots=True, eq=False)
class Holder:
    """A worker and the leases that it holds."""

    name: str
    place: Place
    moved_at: float
    leases: dict[str, HeldLease] = field(default_factory=dict)
    num_closing: int = 0
    """Leases taken back whose call has not returned yet."""
    num_steps: int = -1
    rests_until: float = -math.inf
    is_alone: bool = False
    """True while it holds one document that runs alone."""
    is_draining: bool = False
    """True once its node is about to go."""

    @property
    def is_empty(self) -> bool:
        """Return True if it holds no lease, not even one that is being taken back."""
        return not self.num_taken

    @property
    def num_taken(self) -> int:
        """Count its leases, those being taken back included."""
        return len(self.leases) + self.num_closing

    @property
    def holds_struck(self) -> bool:
        """Return True if every document that it holds was struck elsewhere, too: that explains its
        death.
        """
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
    """Output tokens so far; None while it is not in the engine."""


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

        stem: the beginning of every lease id. tried: documents that earlier starts have charged;
        one that was charged at a known place runs alone. group_rows: the rows of each row group of
        each file, as workers read it. num_extra: those of a worker's leases that wait there behind
        a full batch; near the end there are none, for the sake of workers that have nothing to do.
        """
        self._job = job
        self.num_open = len(estimates)
        """Number of documents that are neither finished nor given up."""
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
        """Documents that wait to run alone, in the order of work."""
        for document in apart:
            self._put_back(document)
        self._has_charged = False
        self.given_up: list[GivenUp] = []
        """The documents that became error rows; who makes these removes them."""
        self.workers: dict[str, Holder] = {}
        """The workers that are ready."""
        self.held: dict[str, HeldLease] = {}
        """The leases in force."""
        self._num_granted = itertools.count(1)
        self._deaths: Counter[Place] = Counter()
        """Deaths in a row that no document explains, without a document done between."""
        self._last_words: dict[Place, str] = {}
        self._left_out: set[Place] = set()
        self._num_coming = 0

    # What there is

    @property
    def num_waiting(self) -> int:
        """Count the open documents that no worker holds."""
        return len(self._backlog) + len(self._alone)

    @property
    def is_done(self) -> bool:
        """Return True if no document is open."""
        return not self.num_open

    @property
    def num_wanted(self) -> int:
        """Count the workers that are of use.

        These are the busy ones, one for each document that waits, and one more for each place that
        may be at fault for a death.
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
        """List open documents that no worker holds, up to a number, those that run alone first."""
        return [*(key for _, key in self._alone), *self._backlog.first(limit)][:limit]

    def running(self) -> list[tuple[int, int, int]]:
        """List the documents in engines: the prompt tokens of each, the most output tokens, and
        those so far; zeros if it has not begun to decode.
        """
        return [
            (*held.lease.estimate, held.num_outputs) if held.num_outputs else (0, 0, 0)
            for held in self.held.values()
            if held.num_outputs is not None
        ]

    def charges(self) -> dict[DocumentKey, Tried] | None:
        """List open documents that may have ended workers; None if there is no new one since the
        last call.
        """
        if not self._has_charged:
            return None
        self._has_charged = False
        struck = (document for document in self._documents.values() if document.struck)
        return {
            document.key: Tried(document.attempts, frozenset(document.struck))
            for document in struck
        }

    # Workers come

    def expect(self, num_coming: int) -> None:
        """Note how many workers are being built: a document that was struck at all other places
        waits for them.
        """
        self._num_coming = num_coming

    def join(self, worker: str, place: Place, now: float) -> tuple[int, str] | None:
        """Note that a worker is ready.

        If its place is left out, returns the number of workers that have died there in a row, and
        why the last one did.
        """
        assert worker not in self.workers, f"{worker} joined twice"
        self.workers[worker] = Holder(worker, place, now)
        others = {other.place for other in self.workers.values()} - {place} - self._left_out
        if self._deaths[place] >= MAX_DEATHS and any(
            self._deaths[other] < self._deaths[place] for other in others
        ):
            self._left_out.add(place)
        return (self._deaths[place], self._last_words[place]) if place in self._left_out else None

    def report(self, worker: str, num_steps: int, outputs: Mapping[str, int], now: float) -> bool:
        """Note a worker's counter of prefill chunks and steps, and the output tokens of its leases
        whose prefill has begun; the others wait.

        Returns True if the counter moved, so that tokens were read or written.
        """
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

    # Documents go to workers

    def assign(self, now: float) -> list[tuple[str, Lease]]:
        """Grant the leases that are due: documents that run alone on empty workers, the others
        spread.
        """
        if not self.num_waiting:
            return []
        takers = [worker for worker in self.workers.values() if self._takes(worker, now)]
        return [*self._assign_alone(takers, now), *self._assign_fresh(takers, now)]

    def _takes(self, worker: Holder, now: float) -> bool:
        """Return True if a worker may get a lease."""
        is_ready = not (worker.is_draining or worker.is_alone)
        return is_ready and worker.rests_until <= now and worker.place not in self._left_out

    def _assign_alone(self, takers: list[Holder], now: float) -> list[tuple[str, Lease]]:
        """Grant documents to empty workers; if one finds none, keep the worker nearest to that from
        filling up.

        Removes the workers that were chosen from `takers`.
        """
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
        """Choose where a document may run that was struck somewhere: of the places allowed those
        with fewest deaths.

        Places on other hosts come first, then others on the same hosts and, if no worker is being
        built, all.
        """
        hosts = {place.host for place in struck}
        known = {worker.place for worker in self.workers.values()} - self._left_out
        allowed = {place for place in known if place.host not in hosts}
        allowed = allowed or known - struck
        if not allowed and not self._num_coming:
            allowed = known
        fewest = min((self._deaths[place] for place in allowed), default=0)
        return {place for place in allowed if self._deaths[place] == fewest}

    def _assign_fresh(self, takers: Sequence[Holder], now: float) -> list[tuple[str, Lease]]:
        """Fill the workers that have room, the emptiest first."""
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

    # Documents end

    def finish(self, lease_id: str) -> None:
        """Close the document of a lease in force, which is done: its worker's place is a good
        one.
        """
        held = self._release(lease_id)
        del self._deaths[held.worker.place]
        self._close(held.document)

    def reject(self, lease_id: str, error: DocumentError) -> None:
        """Give up the document of a lease in force, which failed alone."""
        held = self._release(lease_id)
        held.document.attempts += 1
        self._give_up(held, error)

    def seconds_for(self, lease: Lease) -> float:
        """Return the seconds that a document may take from the start of its prefill."""
        return self._job.document_deadline_s * (1 + lease.estimate.total / 1000)

    def overdue(self, now: float) -> list[HeldLease]:
        """List the leases past their document's deadline."""
        return [
            held
            for held in self.held.values()
            if held.started_at is not None and now - held.started_at > self.seconds_for(held.lease)
        ]

    def expire(self, lease_id: str, message: str) -> None:
        """Take an overdue lease back and charge its document. Call `closed` when the worker has let
        go of it.
        """
        error = _failure("DeadlineExceeded", message)
        self._charge(self._call_back(lease_id), error, is_certain=True)

    def blame(self, lease_id: str, error: DocumentError) -> None:
        """Charge the document of a lease in force: its batch failed, perhaps through its fault, or
        nobody can read it.
        """
        held = self._release(lease_id)
        self._charge(held, error, is_certain=held.lease.is_alone or error.stage == "read")

    def unread(self, lease_id: str, now: float) -> None:
        """Put a document back that its worker could not read but others may. The worker rests for
        `PAUSE_S`.
        """
        held = self._release(lease_id)
        self._put_back(held.document)
        worker = held.worker
        worker.rests_until = now + PAUSE_S
        if all(other.started_at is None for other in worker.leases.values()):
            worker.moved_at = now  # it has answered, and decodes nothing that may hang

    def take_back(self, lease_id: str, message: str) -> None:
        """Take a lease back whose call was lost through no fault of the document, as if its node
        had died.
        """
        self._count_loss(self._release(lease_id), message)

    def closed(self, worker: str) -> None:
        """Note that the call of a lease taken back has returned."""
        state = self.workers[worker]
        state.num_closing -= 1
        assert state.num_closing >= 0

    # Workers go

    def drain(self, worker: str) -> list[Lease]:
        """Grant nothing more to a worker whose node is about to go, and take back what has not
        begun there.

        What runs may finish. No document is charged, nor is the loss of its node counted. Returns
        the leases; call `closed` when the worker has let go of one.
        """
        state = self.workers[worker]
        state.is_draining = True
        waiting = [held.lease for held in state.leases.values() if held.started_at is None]
        for lease in waiting:
            self._put_back(self._call_back(lease.lease_id).document)
        self._backlog.leave(worker)
        return waiting

    def spare(self, now: float) -> list[str]:
        """List the workers to be let go: empty draining ones, and idle ones of which more are left
        than are of use.
        """
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
        """Remove a worker without leases that was let go."""
        assert self._drop(worker).is_empty, f"{worker} is at work"

    def stalled(self, now: float) -> list[str]:
        """List the workers that hold leases and have made no step for `stall_s`."""
        return [
            name
            for name, worker in self.workers.items()
            if not worker.is_empty and now - worker.moved_at > self._job.stall_s
        ]

    def leave(self, worker: str, error_class: str, message: str) -> None:
        """Remove a worker that died: charge the documents that it had started, and free the others.

        A document that ran alone is charged even if the worker died before it could report the
        start.
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
        """Remove a worker that went down with its node: no document is charged.

        A loss that was announced says nothing about the documents, so it is not even counted.
        """
        state = self._drop(worker)
        for held in state.leases.values():
            if state.is_draining:
                self._put_back(held.document)
            else:
                self._count_loss(held, message)

    # Records

    def _release(self, lease_id: str) -> HeldLease:
        """End a lease in force and return it."""
        held = self.held.pop(lease_id)
        worker = held.worker
        del worker.leases[lease_id]
        worker.is_alone = worker.is_alone and bool(worker.leases)
        return held

    def _call_back(self, lease_id: str) -> HeldLease:
        """End a lease whose call has not returned; the worker counts it until `closed`."""
        self.held[lease_id].worker.num_closing += 1
        return self._release(lease_id)

    def _drop(self, worker: str) -> Holder:
        """Remove a worker; return it with its leases, which are no longer in force."""
        self._backlog.leave(worker)
        state = self.workers.pop(worker)
        for lease_id in state.leases:
            del self.held[lease_id]
        return state

    def _put_back(self, document: OpenDocument) -> None:
        """Let a document wait."""
        if document.runs_alone:
            bisect.insort(self._alone, rank(self._estimates[document.key].total, document.key))
            return
        # as if it had never been leased
        if not (document.attempts or document.losses or document.struck):
            del self._documents[document.key]
        self._backlog.put(document.key)

    def _charge(self, held: HeldLease, error: DocumentError, *, is_certain: bool) -> None:
        """Charge a document, which runs alone from now on unless it was only read.

        If it is not certain to be at fault, its last attempt is kept for a run alone.
        """
        document = held.document
        was_decoded = error.stage != "read"
        if was_decoded:
            document.struck.add(held.worker.place)
        if is_certain or document.num_counted + 1 < self._job.max_attempts:
            document.attempts += 1
        if document.num_counted >= self._job.max_attempts:
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
    """Return the error of a document about which no worker could say one."""
    return DocumentError(error_class, message, "decode", retryable=True)
