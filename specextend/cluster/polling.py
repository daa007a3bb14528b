"""When to poll which worker: each every few seconds, and more rarely the more workers there are. Pure."""

from __future__ import annotations

import heapq

POLLS_PER_S = 250.0
"""Most polls in a second, by all workers together: they take 3% to 5% of a core, however many workers there are."""


class PollRound:
    """Workers that wait for their next poll."""

    def __init__(self, every_s: float, polls_per_s: float = POLLS_PER_S) -> None:
        """Take the seconds between two polls of a worker, if there is time for so many."""
        self._every_s, self._polls_per_s = every_s, polls_per_s
        self._due: list[tuple[float, str]] = []
        self._workers: set[str] = set()
        self._allowed = 1.0
        self._now = 0.0

    def add(self, worker: str, now: float) -> None:
        """Let a worker be polled from now on: the first time when `every_s` have passed."""
        self._workers.add(worker)
        heapq.heappush(self._due, (now + self._every_s, worker))

    def remove(self, worker: str) -> None:
        """Poll a worker no more."""
        self._workers.discard(worker)

    def due(self, now: float) -> list[str]:
        """Remove and name the workers to poll now. Each comes back with `add` when it has answered."""
        self._allowed = min(self._allowed + (now - self._now) * self._polls_per_s, max(1.0, self._polls_per_s))
        self._now = now
        names: list[str] = []
        while self._due and self._due[0][0] <= now and len(names) + 1 <= self._allowed:
            _, worker = heapq.heappop(self._due)
            if worker in self._workers:
                names.append(worker)
        self._allowed -= len(names)
        return names
