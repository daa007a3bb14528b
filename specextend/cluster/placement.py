"""Which worker takes a document that runs alone, and which leases wait at the wrong worker. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from specextend.cluster.lease_table import Holder
from specextend.cluster.leases import Held, Item
from specextend.cluster.places import Place, Places, Spot


class Retries:
    """Workers for documents that run alone, chosen once in a turn of the driver."""

    def __init__(self, places: Places, workers: Mapping[str, Holder], takers: Mapping[str, Holder], now: float) -> None:
        """Take all workers, and those that take leases. A worker that was reserved before stays the first choice."""
        self.chosen: set[str] = set()
        self._places, self._workers, self._takers, self._now = places, workers, takers, now
        free = [name for name, worker in takers.items() if not worker.alone]
        self._nearest_to_empty = sorted(free, key=lambda name: takers[name].distance)
        self._allowed: dict[tuple[int, frozenset[Spot]], set[Place]] = {}

    def choose(self, item: Item) -> str | None:
        """Choose the worker that may get a document, can read it, and seems to run empty first."""
        allowed, file = self._places_for(item), item.key.file
        for name in self._nearest_to_empty:
            worker = self._takers[name]
            if name not in self.chosen and worker.place in allowed and worker.sees(file, self._now):
                self.chosen.add(name)
                return name
        return None

    def _places_for(self, item: Item) -> set[Place]:
        question = item.key.file, frozenset(item.struck)
        if question not in self._allowed:
            seeing = {worker.place for worker in self._workers.values() if worker.sees(item.key.file, self._now)}
            self._allowed[question] = self._places.for_retry(item.struck, seeing)
        return self._allowed[question]


def misplaced(takers: Iterable[Holder], capacity: Callable[[Holder], int], now: float) -> list[Held]:
    """Find leases that wait behind a long document although another worker is idle, the longest of each worker first.

    takers: workers that take leases. capacity: how many one may hold. An idle worker has no queue and two leases fewer
    than the slow one, so that no lease moves back and forth.
    """
    takers = list(takers)
    slow = [(-worker.num_before, worker.number, worker.queue()) for worker in takers if worker.has_queue]
    free = [worker for worker in takers if not worker.has_queue and worker.num_taken < capacity(worker)]
    idle = [(worker.num_taken, worker.number, worker) for worker in free] if slow else []
    heapq.heapify(slow)
    heapq.heapify(idle)
    found: list[Held] = []
    while slow and idle:
        negative, number, queue = slow[0]
        num_taken, idle_number, worker = idle[0]
        if -negative < num_taken + 2:
            break
        if not worker.sees(queue[-1].lease.key.file, now):
            heapq.heappop(idle)
            continue
        found.append(queue.pop())
        heapq.heapreplace(idle, (num_taken + 1, idle_number, worker))
        if queue:
            heapq.heapreplace(slow, (negative + 1, number, queue))
        else:
            heapq.heappop(slow)
    return found
