"""The scheduler: which worker gets which document, and which documents a failure charges. Pure.

It has no Ray, no files and no clock of its own: times are seconds of any monotonic clock that the caller passes in. A
document is open until `finish` or a `GivenUp` closes it; at most one worker holds its lease at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from specextend.cluster.estimates import Estimates
from specextend.cluster.lease_table import Holder, LeaseTable
from specextend.cluster.leases import GivenUp, Lease, Limits, Tried
from specextend.cluster.open_documents import OpenDocuments
from specextend.cluster.placement import Retries, misplaced
from specextend.cluster.places import Coming, Place, Places, Rest
from specextend.cluster.speeds import Speeds
from specextend.core import DocumentKey

ALONE_SHARE = 4
"""One worker in this many, and at least one, may be kept for documents that run alone while others wait."""
IDLE_S = 60.0
"""Seconds without a lease after which a worker is let go that is of no use any more."""


class Scheduler:
    """Leases documents to workers, by neighbourhood and longest first."""

    def __init__(
        self,
        estimates: Estimates,
        limits: Limits,
        leases_per_worker: int,
        stem: str = "",
        tried: Mapping[DocumentKey, Tried] | None = None,
        group_rows: Sequence[Sequence[int]] = (),
    ) -> None:
        """Queue the documents.

        stem: the beginning of every lease id. tried: documents that earlier starts have charged; one that has not
        become an error row runs alone. group_rows: the rows of each row group of each file, as workers read it.
        """
        self.limits = limits
        self._leases_per_worker = leases_per_worker
        self._documents = OpenDocuments(estimates, limits, tried or {}, group_rows)
        self._places = Places()
        self._speeds = Speeds(leases_per_worker)
        self._leases = LeaseTable(limits, leases_per_worker, stem)
        self._workers = self._leases.workers
        self._reserved: list[str] = []

    @property
    def num_open(self) -> int:
        """Count the documents that are neither finished nor given up."""
        return self._documents.num_open

    @property
    def num_waiting(self) -> int:
        """Count the open documents that no worker holds."""
        return self._documents.num_waiting

    @property
    def is_done(self) -> bool:
        """Return True if no document is open."""
        return not self._documents.num_open

    @property
    def num_wanted(self) -> int:
        """Count the workers that are of use.

        These are the busy ones, one for each document that waits here or at a worker, and one more for each place of a
        death.
        """
        num_busy = len(self._workers) - len(self._leases.idle)
        useful = min(self.num_open, num_busy + self.num_waiting + self._leases.num_not_started)
        if not (self._documents.alone or self._places.has_deaths):
            return useful
        struck = {spot for _, key in self._documents.alone for spot in self._documents.item(key).struck}
        places = [worker.place for worker in self._workers.values()]
        return useful + sum(self._places.num_deaths(place) > 0 or place.spot in struck for place in places)

    def expect(self, coming: Coming) -> None:
        """Note the workers that are being built: a document that was charged at all other places waits for them."""
        self._places.expect(coming)

    def join(self, worker: str, place: Place, now: float, kind: str = "") -> Rest | None:
        """Note that a worker is ready. Returns its rest if others have died one after the other at its place.

        kind: of its device, such as `NVIDIA H200`; workers of one kind are about as fast.
        """
        rest = self._places.arrive(place)
        self._leases.join(worker, place, rest.seconds if rest else 0.0, now)
        self._speeds.join(worker, kind)
        return rest

    def assign(self, now: float) -> list[tuple[str, Lease]]:
        """Grant the leases that are due: charged documents alone on empty workers, the others spread."""
        self._leases.now = now
        self._documents.put_back_later(now)
        return [*self._assign_alone(now), *self._assign_fresh(now)]

    def _takes(self, worker: Holder, now: float) -> bool:
        """Return True if a worker takes leases now."""
        ready = worker.takes_leases and not worker.is_draining and worker.rests_until <= now
        return ready and not self._places.is_left_out(worker.place)

    def _assign_alone(self, now: float) -> list[tuple[str, Lease]]:
        """Grant charged documents to empty workers; for one that finds none, keep a worker from filling up again."""
        takers = {}
        if self._documents.alone:
            takers = {name: worker for name, worker in self._workers.items() if self._takes(worker, now)}
        search = Retries(self._places, self._workers, takers, now)
        for name in self._reserved:
            if name in self._workers:
                self._workers[name].is_reserved = False
        self._reserved = []
        most = max(1, len(takers) // ALONE_SHARE) if self._documents.num_fresh else len(takers)
        room = most - sum(worker.alone for worker in takers.values())
        granted: list[tuple[str, Lease]] = []
        for entry in list(self._documents.alone) if takers else []:
            if len(search.chosen) >= room:
                break
            item = self._documents.item(entry[1])
            if (worker := search.choose(item)) is None:
                continue
            if takers[worker].is_empty:
                self._documents.alone.remove(entry)
                granted.append((worker, self._grant(worker, item.key, now)))
                takers[worker].alone = True
            else:
                takers[worker].is_reserved = True
                self._reserved.append(worker)
        return granted

    def _assign_fresh(self, now: float) -> list[tuple[str, Lease]]:
        """Fill the workers that have room, the emptiest first."""
        if not self._documents.num_fresh:
            return []
        states = [(self._workers[name], name) for name in self._leases.roomy]
        free = [
            (worker.num_taken, worker.number, name)
            for worker, name in states
            if not (worker.alone or worker.is_reserved) and self._takes(worker, now)
        ]
        heapq.heapify(free)
        granted = []
        while self._documents.num_fresh and free:
            num_taken, number, name = free[0]
            worker = self._workers[name]
            files = worker.blind_to(now)
            has_room = num_taken < self._capacity(worker) and None not in files
            if has_room and (key := self._documents.take(name, files, self._longest_for(name))) is not None:
                granted.append((name, self._grant(name, key, now)))
                heapq.heapreplace(free, (num_taken + 1, number, name))
            else:
                heapq.heappop(free)
        return granted

    def _longest_for(self, worker: str) -> float:
        """Return the tokens of the longest document that a worker may get: a slow one must not be the last to end."""
        return self._speeds.longest_for(worker, self._documents.num_tokens)

    def _capacity(self, worker: Holder) -> int:
        """Count the leases that a worker may hold."""
        return 1 if self._places.is_on_trial(worker.place) else self._leases_per_worker

    def rebalance(self, now: float) -> list[tuple[str, Lease]]:
        """Take leases back from the queues of slow workers, so that `assign` gives the documents to idle ones.

        Returns the slow workers and the leases. This happens only at the end of a run, when no document waits here. An
        idle worker has no queue and two leases fewer than the slow one, so that no lease moves back and forth. No
        attempt is charged. Call `closed` when the slow worker has let go of a lease.
        """
        if self._documents.num_fresh or self._documents.alone:
            return []
        takers = [worker for worker in self._workers.values() if not worker.alone and self._takes(worker, now)]
        moved = misplaced(takers, self._capacity, now)
        for held in moved:
            self._call_back(held.lease)
        return [(held.worker, held.lease) for held in moved]

    def drain(self, worker: str) -> list[Lease]:
        """Grant nothing more to a worker whose node is about to go, and take back what has not begun there.

        What runs may finish. No document is charged, nor is the loss of its node counted. Returns the leases; call
        `closed` when the worker has let go of one.
        """
        state = self._workers[worker]
        state.is_draining = True
        self._speeds.leave(worker)
        waiting = [held.lease for held in state.leases.values() if held.started_at is None]
        for lease in waiting:
            self._call_back(lease)
        self._documents.left_by(worker)
        return waiting

    def _call_back(self, lease: Lease) -> None:
        """Take a lease back that has not begun."""
        self._documents.put_back(self._leases.call_back(lease.lease_id).item)

    def is_draining(self, worker: str) -> bool:
        """Return True if a worker's node is about to go."""
        return worker in self._workers and self._workers[worker].is_draining

    def spare(self, now: float) -> list[str]:
        """List the workers to be let go: idle ones of which more are left than are of use, and empty draining ones."""
        draining = [name for name in self._leases.idle if self._workers[name].is_draining]
        surplus = len(self._workers) - len(draining) - self.num_wanted
        idle: list[str] = []
        for name, since in self._leases.idle.items():
            if len(idle) >= surplus or now - since < IDLE_S:
                break
            state = self._workers[name]
            if state.takes_leases and not state.is_draining and not self._places.is_left_out(state.place):
                idle.append(name)
        return draining + idle

    def release(self, worker: str) -> None:
        """Remove a worker without leases that was let go."""
        state = self._drop(worker)
        assert state.is_empty, f"{worker} is at work"
        self._places.depart(state.place)

    def suspend(self, worker: str) -> bool:
        """Grant nothing more to a worker that is gone, until `leave` or `lose` says why it is gone.

        Returns True if its documents explain its end.
        """
        state = self._workers[worker]
        state.takes_leases = False
        state.is_trusted = self._places.is_trusted(state.place)  # before its successor counts as coming
        return state.holds_struck

    def report(self, worker: str, num_steps: int, started: Iterable[str], now: float) -> None:
        """Note a worker's step counter and its leases whose prefill has begun; its other leases wait."""
        self._leases.report(worker, num_steps, started, now)

    def lease(self, lease_id: str) -> Lease | None:
        """Return a lease that is in force; None for any other."""
        return self._leases[lease_id].lease if lease_id in self._leases else None

    def leased(self) -> list[Lease]:
        """List the leases in force."""
        return self._leases.leases()

    def first_waiting(self, limit: int) -> list[DocumentKey]:
        """List open documents that no worker holds, up to a number, those that are charged first."""
        return self._documents.first_waiting(limit)

    def holder(self, lease_id: str) -> str:
        """Return the worker that holds a lease in force."""
        return self._leases[lease_id].worker

    def finish(self, lease_id: str) -> bool:
        """Close the document of a lease. Returns False if the lease was taken back: then drop the result."""
        if lease_id not in self._leases:
            return False
        held = self._leases.release(lease_id)
        state = self._workers[held.worker]
        state.has_read(held.item.key.file)
        self._speeds.done(held.worker, held.item.num_tokens, self._leases.now, is_idle=state.is_empty)
        self._documents.close(held.item)
        return True

    def produced(self, worker: str) -> None:
        """Note that a worker has done a document: its place is trusted again."""
        self._places.produced(self._workers[worker].place)

    def charges(self) -> dict[DocumentKey, Tried] | None:
        """List open documents that may have ended workers; None if none was charged since the last call."""
        return self._documents.charges()

    def overdue(self, now: float) -> list[Lease]:
        """List the leases past their document's deadline."""
        return self._leases.overdue(now)

    def expire(self, lease_id: str, message: str) -> list[GivenUp]:
        """Take an overdue lease back and charge its document. Call `closed` when the worker has let go of it."""
        held = self._leases.call_back(lease_id)
        worker = self._workers[held.worker]
        worker.expired_at_step = worker.num_steps
        return self._documents.charge(held.item, worker.place, "DeadlineExceeded", message, is_certain=True)

    def blame(self, lease_id: str, error_class: str, message: str) -> list[GivenUp]:
        """Charge the document of a lease in force whose batch failed, perhaps through its fault."""
        held = self._leases.release(lease_id)
        place = self._workers[held.worker].place
        return self._documents.charge(held.item, place, error_class, message, is_certain=False)

    def unread(self, lease_id: str, now: float) -> float:
        """Put a document back that its worker could not read but others may, uncharged.

        Returns the seconds during which the worker gets no documents of that file.
        """
        held = self._leases[lease_id]
        self.put_back(lease_id, now)
        return self._workers[held.worker].could_not_read(held.item.key.file, now)

    def put_back(self, lease_id: str, now: float) -> None:
        """Put a document back that could not be read, if the driver has not found out why."""
        held = self._leases.release(lease_id)
        self._documents.put_back(held.item)
        worker = self._workers[held.worker]
        if all(other.started_at is None for other in worker.leases.values()):
            worker.moved_at = now  # it has answered, and decodes nothing that may hang

    def damaged(self, lease_id: str, error_class: str, message: str, now: float) -> list[GivenUp]:
        """Charge the document of a lease in force that nobody can read, and let it wait for `PAUSE_S`."""
        held = self._leases.release(lease_id)
        return self._documents.charge_damaged(held.item, error_class, message, now)

    def sees(self, worker: str, file: int, now: float) -> bool:
        """Return True if a worker may get documents of a file; False while it pauses because it could not read one."""
        return self._workers[worker].sees(file, now)

    def take_back(self, lease_id: str, message: str) -> list[GivenUp]:
        """Take a lease back whose call was lost through no fault of the document, as if its node had died."""
        if lease_id not in self._leases:
            return []
        return self._documents.count_loss(self._leases.release(lease_id).item, message)

    def closed(self, worker: str) -> None:
        """Note that the call of a lease taken back has returned."""
        self._leases.closed(worker)

    def stalled(self, now: float) -> list[str]:
        """List the workers that hold leases and have made no step for `stall_s`."""
        return [
            name
            for name, worker in self._workers.items()
            if worker.takes_leases and not worker.is_empty and now - worker.moved_at > self.limits.stall_s
        ]

    def leave(self, worker: str, error_class: str, message: str) -> list[GivenUp]:
        """Remove a worker that died: charge the documents that it had started, and free the others.

        A document that ran alone, or on trial, is charged even if the worker died before it could report the start,
        unless the worker made no step since it was told to drop another document, which may then be the one that hung.
        At a place that is not trusted no document is charged; those that had started run alone next, elsewhere.
        """
        if self._workers[worker].takes_leases:
            self.suspend(worker)
        state = self._drop(worker)
        is_alone = state.alone or (len(state.leases) == 1 and self._places.is_on_trial(state.place))
        certain = is_alone and not state.may_hang
        self._places.died(state.place, message, is_explained=state.holds_struck)
        given_up: list[GivenUp] = []
        for held in state.leases.values():
            if held.started_at is None and not certain:
                self._documents.expose(held.item)
            elif state.is_trusted:
                given_up += self._documents.charge(held.item, state.place, error_class, message, is_certain=is_alone)
            else:
                self._documents.set_apart(held.item, state.place)
        return given_up

    def lose(self, worker: str, message: str) -> list[GivenUp]:
        """Remove a worker that went down with its node: no document is charged.

        A loss that was announced says nothing about the documents, so it is not even counted.
        """
        state = self._drop(worker)
        self._places.depart(state.place)
        if state.is_draining:
            for held in state.leases.values():
                self._documents.put_back(held.item)
            return []
        return [
            given_up for held in state.leases.values() for given_up in self._documents.count_loss(held.item, message)
        ]

    def _drop(self, worker: str) -> Holder:
        self._documents.left_by(worker)
        self._speeds.leave(worker)
        return self._leases.drop(worker)

    def _grant(self, worker: str, key: DocumentKey, now: float) -> Lease:
        if self._workers[worker].is_empty:
            self._speeds.at_work(worker, now)
        return self._leases.grant(worker, self._documents.item(key), now)
