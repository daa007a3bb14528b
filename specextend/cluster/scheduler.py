"""Who works on which document, and what a death costs whom. Pure: no Ray, no clock of its own, no files.

A document is open until `finish` or a `GivenUp` names it; it is leased to at most one worker at a time. Times
are seconds of any monotonic clock that the caller passes in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from specextend.cluster.leases import MAX_UNCHARGED_EXPOSURES, PAUSE_S, GivenUp, Held, Holder, Item, Lease, Limits
from specextend.cluster.waiting import Waiting
from specextend.core import DocumentKey


class Scheduler:
    """Leases documents to workers, longest first."""

    def __init__(
        self, documents: Iterable[tuple[DocumentKey, int]], limits: Limits, leases_per_worker: int, stem: str = ""
    ) -> None:
        """`documents`: keys, each once, with their estimated tokens. `stem` begins every lease id."""
        self._limits = limits
        self._leases_per_worker = leases_per_worker
        self._stem = stem
        self._fresh, self._alone = Waiting(), Waiting()
        self._later: list[tuple[float, DocumentKey]] = []
        self._items: dict[DocumentKey, Item] = {}
        self._held: dict[str, Held] = {}
        self._workers: dict[str, Holder] = {}
        for key, num_tokens in documents:
            assert key not in self._items, f"{key} twice"
            self._items[key] = Item(key, num_tokens)
            self._fresh.put(key, num_tokens)

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
        self._workers[worker] = Holder(moved_at=now)

    def assign(self, now: float) -> list[tuple[str, Lease]]:
        """Leases to hand out now: charged documents alone on empty workers, the others longest first, spread."""
        while self._later and self._later[0][0] <= now:
            self._enqueue(self._items[heapq.heappop(self._later)[1]])
        granted = []
        takers = {name: worker for name, worker in self._workers.items() if worker.takes_leases}
        for name, worker in takers.items():
            if worker.is_empty and (key := self._take(self._alone, worker, now)) is not None:
                worker.alone = True
                granted.append((name, self._grant(name, key, now)))
        while self._fresh and (roomiest := self._roomiest(takers)) is not None:
            if (key := self._take(self._fresh, takers[roomiest], now)) is not None:
                granted.append((roomiest, self._grant(roomiest, key, now)))
            else:
                del takers[roomiest]
        return granted

    def _take(self, waiting: Waiting, worker: Holder, now: float) -> DocumentKey | None:
        """The first document that a worker may have."""
        if not waiting or None in (files := worker.blind_to(now)):
            return None
        return waiting.take(but_of=files)

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
                state.has_read(held.item.key.file)

    def lease(self, lease_id: str) -> Lease | None:
        """The lease, while it is in force."""
        held = self._held.get(lease_id)
        return held.lease if held is not None else None

    def leased(self) -> list[DocumentKey]:
        """Documents that workers hold."""
        return [held.lease.key for held in self._held.values()]

    def waiting(self) -> list[DocumentKey]:
        """Open documents that no worker holds, in the order in which they will be leased."""
        return [*self._alone.keys(), *self._fresh.keys(), *(key for _, key in sorted(self._later))]

    def holder(self, lease_id: str) -> str:
        """The worker that holds a lease in force."""
        return self._held[lease_id].worker

    def finish(self, lease_id: str) -> bool:
        """Close the document of this lease; False where the lease was taken away, so its result must be dropped."""
        held = self._release(lease_id)
        if held is None:
            return False
        self._workers[held.worker].has_read(held.item.key.file)
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
        held = self._held[lease_id]
        self.put_back(lease_id, now)
        return self._workers[held.worker].could_not_read(held.item.key.file, now)

    def put_back(self, lease_id: str, now: float) -> None:
        """It could not be read, and nobody has looked why: it waits again."""
        held = self._release(lease_id)
        assert held is not None
        self._enqueue(held.item)
        worker = self._workers[held.worker]
        if all(other.started_at is None for other in worker.leases.values()):
            worker.moved_at = now  # it has answered, and nothing that it decodes may hang

    def damaged(self, lease_id: str, error_class: str, message: str, now: float) -> list[GivenUp]:
        """Nobody can read it: charge the document of a lease in force, and let it wait for `PAUSE_S`."""
        held = self._release(lease_id)
        assert held is not None
        held.item.attempts += 1
        if held.item.attempts >= self._limits.max_attempts:
            return [self._give_up(held.item, error_class, message)]
        heapq.heappush(self._later, (now + PAUSE_S, held.item.key))
        return []

    def sees(self, worker: str, file: int, now: float) -> bool:
        """Whether a worker may get documents of a file, or waits because it could not read one."""
        return self._workers[worker].sees(file, now)

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
        held = {name: worker.num_taken for name, worker in takers.items() if not worker.alone}
        name = min(held, key=held.__getitem__, default=None)
        return name if name is not None and held[name] < self._leases_per_worker else None

    def _misplaced(self, now: float) -> Held | None:
        """The longest lease that waits at the busiest worker, if another one is idle."""
        takers = [worker for worker in self._workers.values() if worker.takes_leases and not worker.alone]
        slow = max((worker for worker in takers if worker.queued()), key=lambda each: each.num_before, default=None)
        held = slow.queued() if slow is not None else None
        if slow is None or held is None:
            return None
        idle = min(
            (each.num_taken for each in takers if not each.queued() and each.sees(held.lease.key.file, now)),
            default=self._leases_per_worker,
        )
        return held if idle < self._leases_per_worker and slow.num_before >= idle + 2 else None

    def _release(self, lease_id: str) -> Held | None:
        held = self._held.pop(lease_id, None)
        if held is not None:
            worker = self._workers[held.worker]
            del worker.leases[lease_id]
            worker.alone = worker.alone and bool(worker.leases)
        return held

    def _charge(self, item: Item, error_class: str, message: str, *, is_certain: bool) -> list[GivenUp]:
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
        (self._alone if item.runs_alone else self._fresh).put(item.key, item.num_tokens)

    def _give_up(self, item: Item, error_class: str, message: str) -> GivenUp:
        del self._items[item.key]
        return GivenUp(item.key, max(item.attempts, 1), error_class, message)
