"""The scheduler: which worker gets which document, and which documents a failure charges. Pure.

It has no Ray, no files and no clock of its own: times are seconds of any monotonic clock that the caller passes in. A
document is open until `finish` or a `GivenUp` closes it; at most one worker holds its lease at a time.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Mapping

from specextend.cluster.leases import (
    MAX_UNCHARGED_EXPOSURES,
    PAUSE_S,
    GivenUp,
    Held,
    Holder,
    Item,
    Lease,
    Limits,
    Rank,
    Tried,
    Waiting,
    nearest_to_empty,
    rank,
)
from specextend.cluster.places import Coming, Place, Places, Rest
from specextend.core import DocumentKey

ALONE_SHARE = 4
"""One worker in this many, and at least one, may be kept for documents that run alone while others wait."""


class Scheduler:
    """Leases documents to workers, longest first."""

    def __init__(
        self,
        documents: Iterable[tuple[DocumentKey, int]],
        limits: Limits,
        leases_per_worker: int,
        stem: str = "",
        tried: Mapping[DocumentKey, Tried] | None = None,
    ) -> None:
        """Queue the documents.

        documents: keys, each once, with their estimated tokens. stem: the beginning of every lease id. tried: documents
        that earlier starts have charged; one that has not become an error row runs alone.
        """
        self._limits = limits
        self._leases_per_worker = leases_per_worker
        self._stem = stem
        self._places = Places()
        self._fresh = Waiting()
        self._alone: list[Rank] = []
        self._has_charged = False
        self._later: list[tuple[float, DocumentKey]] = []
        self._items: dict[DocumentKey, Item] = {}
        self._held: dict[str, Held] = {}
        self._workers: dict[str, Holder] = {}
        for key, num_tokens in documents:
            assert key not in self._items, f"{key} twice"
            before = (tried or {}).get(key, Tried(0))
            counted = before.attempts - before.forgiven
            self._items[key] = item = Item(
                key, num_tokens, before.attempts, before.forgiven, strikes=counted, struck=set(before.struck)
            )
            self._enqueue(item)

    @property
    def num_open(self) -> int:
        """Count the documents that are neither finished nor given up."""
        return len(self._items)

    @property
    def num_waiting(self) -> int:
        """Count the open documents that no worker holds."""
        return len(self._fresh) + len(self._alone) + len(self._later)

    @property
    def is_done(self) -> bool:
        """Return True if no document is open."""
        return not self._items

    @property
    def num_wanted(self) -> int:
        """Count the workers that open documents can use: one each, and one more for each place of a death."""
        struck = {spot for _, key in self._alone for spot in self._items[key].struck}
        places = [worker.place for worker in self._workers.values()]
        return self.num_open + sum(self._places.num_deaths(place) > 0 or place.spot in struck for place in places)

    def expect(self, coming: Coming) -> None:
        """Note the workers that are being built: a document that was charged at all other places waits for them."""
        self._places.expect(coming)

    def join(self, worker: str, place: Place, now: float) -> Rest | None:
        """Note that a worker is ready. Returns its rest if others have died one after the other at its place."""
        assert worker not in self._workers, f"{worker} joined twice"
        rest = self._places.arrive(place)
        self._workers[worker] = Holder(place, now + (rest.seconds if rest else 0.0), moved_at=now)
        return rest

    def assign(self, now: float) -> list[tuple[str, Lease]]:
        """Grant the leases that are due: charged documents alone on empty workers, the others longest first, spread."""
        while self._later and self._later[0][0] <= now:
            self._enqueue(self._items[heapq.heappop(self._later)[1]])
        takers = self._takers(now)
        return [*self._assign_alone(takers, now), *self._assign_fresh(takers, now)]

    def _takers(self, now: float) -> dict[str, Holder]:
        """Select the workers that take leases now."""
        return {
            name: worker
            for name, worker in self._workers.items()
            if worker.takes_leases and worker.rests_until <= now and not self._places.is_left_out(worker.place)
        }

    def _assign_alone(self, takers: dict[str, Holder], now: float) -> list[tuple[str, Lease]]:
        """Grant charged documents to empty workers; for one that finds none, keep a worker from filling up again."""
        most = max(1, len(takers) // ALONE_SHARE) if self._fresh else len(takers)
        room = most - sum(worker.alone for worker in takers.values())
        chosen: set[str] = set()
        granted = []
        for entry in list(self._alone):
            if len(chosen) >= room:
                break
            item = self._items[entry[1]]
            seeing = {worker.place for worker in self._workers.values() if worker.sees(item.key.file, now)}
            allowed = self._places.for_retry(item.struck, seeing)
            free = {name: worker for name, worker in takers.items() if name not in chosen and worker.place in allowed}
            if (name := nearest_to_empty(free, item.key.file, now)) is None:
                continue
            chosen.add(name)
            if takers[name].is_empty:
                self._alone.remove(entry)
                granted.append((name, self._grant(name, item.key, now)))
                takers[name].alone = True
        for name, worker in takers.items():
            worker.is_reserved = name in chosen and not worker.alone
        return granted

    def _assign_fresh(self, takers: dict[str, Holder], now: float) -> list[tuple[str, Lease]]:
        granted = []
        takers = {name: worker for name, worker in takers.items() if not (worker.alone or worker.is_reserved)}
        while self._fresh and (roomiest := self._roomiest(takers)) is not None:
            files = takers[roomiest].blind_to(now)
            if None not in files and (key := self._fresh.take(but_of=files)) is not None:
                granted.append((roomiest, self._grant(roomiest, key, now)))
            else:
                del takers[roomiest]
        return granted

    def _capacity(self, worker: Holder) -> int:
        """Count the leases that a worker may hold."""
        return 1 if self._places.is_on_trial(worker.place) else self._leases_per_worker

    def rebalance(self, now: float) -> tuple[str, Lease] | None:
        """Take a lease back from the queue of a slow worker, so that `assign` gives the document to an idle one.

        Returns the slow worker and the lease; None if none is to be moved. This happens only at the end of a run, when
        no document waits here. The idle worker has no queue and two leases fewer than the slow one, so that no lease
        moves back and forth. No attempt is charged. Call `closed` when the slow worker has let go of the lease.
        """
        if self._fresh or self._alone or (held := self._misplaced(now)) is None:
            return None
        self._workers[held.worker].num_closing += 1
        self._release(held.lease.lease_id)
        self._enqueue(held.item)
        return held.worker, held.lease

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
        if (state := self._workers.get(worker)) is None:
            return
        if num_steps != state.num_steps:
            state.num_steps, state.moved_at = num_steps, now
        begun = set(started)
        for lease_id, held in state.leases.items():
            held.is_queued = held.started_at is None and lease_id not in begun
            if held.started_at is None and lease_id in begun:
                held.started_at = now
                state.has_read(held.item.key.file)

    def lease(self, lease_id: str) -> Lease | None:
        """Return a lease that is in force; None for any other."""
        held = self._held.get(lease_id)
        return held.lease if held is not None else None

    def leased(self) -> list[DocumentKey]:
        """List the documents that workers hold."""
        return [held.lease.key for held in self._held.values()]

    def waiting(self) -> list[DocumentKey]:
        """List the open documents that no worker holds, in the order in which they will be leased."""
        return [*(key for _, key in self._alone), *self._fresh.keys(), *(key for _, key in sorted(self._later))]

    def holder(self, lease_id: str) -> str:
        """Return the worker that holds a lease in force."""
        return self._held[lease_id].worker

    def finish(self, lease_id: str) -> bool:
        """Close the document of a lease. Returns False if the lease was taken back: then drop the result."""
        held = self._release(lease_id)
        if held is None:
            return False
        self._workers[held.worker].has_read(held.item.key.file)
        del self._items[held.item.key]
        return True

    def produced(self, worker: str) -> None:
        """Note that a worker has done a document: its place is trusted again."""
        self._places.produced(self._workers[worker].place)

    def charges(self) -> dict[DocumentKey, Tried] | None:
        """List open documents that may have ended workers; None if none was charged since the last call."""
        if not self._has_charged:
            return None
        self._has_charged = False
        charged = (item for item in self._items.values() if item.strikes)
        return {item.key: Tried(item.attempts, frozenset(item.struck)) for item in charged}

    def overdue(self, now: float) -> list[Lease]:
        """List the leases past their document's deadline."""
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
        return self._charge(held.item, worker.place, "DeadlineExceeded", message, is_certain=True)

    def blame(self, lease_id: str, error_class: str, message: str) -> list[GivenUp]:
        """Charge the document of a lease in force whose batch failed, perhaps through its fault."""
        held = self._release(lease_id)
        assert held is not None
        place = self._workers[held.worker].place
        return self._charge(held.item, place, error_class, message, is_certain=False)

    def unread(self, lease_id: str, now: float) -> float:
        """Put a document back that its worker could not read but others may, uncharged.

        Returns the seconds during which the worker gets no documents of that file.
        """
        held = self._held[lease_id]
        self.put_back(lease_id, now)
        return self._workers[held.worker].could_not_read(held.item.key.file, now)

    def put_back(self, lease_id: str, now: float) -> None:
        """Put a document back that could not be read, if the driver has not found out why."""
        held = self._release(lease_id)
        assert held is not None
        self._enqueue(held.item)
        worker = self._workers[held.worker]
        if all(other.started_at is None for other in worker.leases.values()):
            worker.moved_at = now  # it has answered, and decodes nothing that may hang

    def damaged(self, lease_id: str, error_class: str, message: str, now: float) -> list[GivenUp]:
        """Charge the document of a lease in force that nobody can read, and let it wait for `PAUSE_S`."""
        held = self._release(lease_id)
        assert held is not None
        held.item.attempts += 1
        if held.item.num_counted >= self._limits.max_attempts:
            return [self._give_up(held.item, error_class, message)]
        heapq.heappush(self._later, (now + PAUSE_S, held.item.key))
        return []

    def sees(self, worker: str, file: int, now: float) -> bool:
        """Return True if a worker may get documents of a file; False while it pauses because it could not read one."""
        return self._workers[worker].sees(file, now)

    def take_back(self, lease_id: str, message: str) -> list[GivenUp]:
        """Take a lease back whose call was lost through no fault of the document, as if its node had died."""
        held = self._release(lease_id)
        return [] if held is None else self._count_loss(held.item, message)

    def closed(self, worker: str) -> None:
        """Note that the call of a lease taken back has returned."""
        if (state := self._workers.get(worker)) is not None:
            state.num_closing -= 1
            assert state.num_closing >= 0

    def stalled(self, now: float) -> list[str]:
        """List the workers that hold leases and have made no step for `stall_s`."""
        return [
            name
            for name, worker in self._workers.items()
            if worker.takes_leases and not worker.is_empty and now - worker.moved_at > self._limits.stall_s
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
                self._expose(held.item)
            elif state.is_trusted:
                given_up += self._charge(held.item, state.place, error_class, message, is_certain=is_alone)
            else:
                self._set_apart(held.item, state.place)
        return given_up

    def lose(self, worker: str, message: str) -> list[GivenUp]:
        """Remove a worker that went down with its node: no document is charged."""
        state = self._drop(worker)
        self._places.depart(state.place)
        return [given_up for held in state.leases.values() for given_up in self._count_loss(held.item, message)]

    def _drop(self, worker: str) -> Holder:
        state = self._workers.pop(worker)
        for lease_id in state.leases:
            del self._held[lease_id]
        return state

    def _grant(self, worker: str, key: DocumentKey, now: float) -> Lease:
        item, state = self._items[key], self._workers[worker]
        item.num_leases += 1
        lease_id = f"{self._stem}{key.file}-{key.row}-{item.num_leases}"
        held = Held(Lease(lease_id, key, item.num_tokens, item.attempts + 1), item, worker)
        if state.is_empty:
            state.moved_at = now
        self._held[lease_id] = state.leases[lease_id] = held
        return held.lease

    def _roomiest(self, takers: dict[str, Holder]) -> str | None:
        held = {name: each.num_taken for name, each in takers.items() if each.num_taken < self._capacity(each)}
        return min(held, key=held.__getitem__, default=None)

    def _misplaced(self, now: float) -> Held | None:
        """Find the longest lease that waits at the busiest worker, if another worker is idle."""
        takers = [worker for worker in self._takers(now).values() if not worker.alone]
        slow = max((worker for worker in takers if worker.queued()), key=lambda each: each.num_before, default=None)
        held = slow.queued() if slow is not None else None
        if slow is None or held is None:
            return None
        free = [each for each in takers if not each.queued() and each.num_taken < self._capacity(each)]
        idle = min((each.num_taken for each in free if each.sees(held.lease.key.file, now)), default=None)
        return held if idle is not None and slow.num_before >= idle + 2 else None

    def _release(self, lease_id: str) -> Held | None:
        held = self._held.pop(lease_id, None)
        if held is not None:
            worker = self._workers[held.worker]
            del worker.leases[lease_id]
            worker.alone = worker.alone and bool(worker.leases)
        return held

    def _charge(self, item: Item, place: Place, error_class: str, message: str, *, is_certain: bool) -> list[GivenUp]:
        """Charge a document. If it is not certain to be at fault, its last attempt is kept for a run alone."""
        if not is_certain and item.num_counted + 1 == self._limits.max_attempts:
            self._set_apart(item, place)
            return []
        item.attempts += 1
        item.strikes += 1
        item.struck.add(place.spot)
        if item.num_counted >= self._limits.max_attempts:
            return [self._give_up(item, error_class, message)]
        self._has_charged = True
        self._enqueue(item)
        return []

    def _set_apart(self, item: Item, place: Place) -> None:
        """Let a document run alone from now on, and elsewhere if it can, without charging it."""
        item.exposures = MAX_UNCHARGED_EXPOSURES
        item.struck.add(place.spot)
        self._enqueue(item)

    def _count_loss(self, item: Item, message: str) -> list[GivenUp]:
        item.losses += 1
        if item.losses >= self._limits.max_losses:
            return [self._give_up(item, "NodeLost", message)]
        self._enqueue(item)
        return []

    def _expose(self, item: Item) -> None:
        item.exposures += 1
        self._enqueue(item)

    def _enqueue(self, item: Item) -> None:
        if item.runs_alone:
            bisect.insort(self._alone, rank(item.num_tokens, item.key))
        else:
            self._fresh.put(item.key, item.num_tokens)

    def _give_up(self, item: Item, error_class: str, message: str) -> GivenUp:
        del self._items[item.key]
        return GivenUp(item.key, max(item.attempts, 1), error_class, message)
