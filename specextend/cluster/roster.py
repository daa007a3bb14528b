"""The roster of workers: which to start when, and when to give the run up because workers fail. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from specextend.cluster.exits import WorkersFailError
from specextend.core import counted

MAX_FAILED_STARTS = 5
"""Workers that cannot be built in a row on one seat, while no other worker is ready, before the run is given up."""
MAX_FRUITLESS_DEATHS = 50
"""Workers that die in a row, with no document done in between, before the run is given up."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
PATIENCE_S = 600.0
"""Seconds during which a worker that is being built counts as coming; a cluster may have no room for it."""


@dataclass(slots=True)
class _Seat:
    """A seat for one worker at a time: a dead one leaves it to its successor."""

    worker: str | None = None
    num_failures: int = 0
    not_before: float = 0.0
    started_at: float = 0.0


class Roster:
    """Up to `size` workers: each that dies is replaced, after a growing pause if the new one cannot be built."""

    def __init__(self, size: int) -> None:
        self._seats = [_Seat() for _ in range(size)]
        self._vacant = list(range(size))
        """Numbers of the seats without a worker, in order."""
        self._number: dict[str, int] = {}
        """Number of each worker's seat."""
        self._building: set[str] = set()
        """Workers that are not ready yet."""
        self._ready: dict[str, None] = {}
        self._num_started = 0
        self._num_fruitless = 0
        self._is_of_use = False

    @property
    def num_ready(self) -> int:
        """Count the workers that take leases."""
        return len(self._ready)

    def ready_workers(self) -> list[str]:
        """Name the workers that take leases."""
        return list(self._ready)

    def due(self, now: float, num_wanted: int) -> list[str]:
        """Name the new workers to start now, so that there are no more in all than are wanted."""
        room = num_wanted - len(self._number)
        chosen = [number for number in self._vacant if self._seats[number].not_before <= now][: max(0, room)]
        names: list[str] = []
        for number in chosen:
            self._num_started += 1
            name = f"worker-{self._num_started}"
            self._seats[number].worker, self._seats[number].started_at = name, now
            self._number[name] = number
            self._building.add(name)
            names.append(name)
        if chosen:
            self._vacant = [number for number in self._vacant if self._seats[number].worker is None]
        return names

    def not_needed(self, num_wanted: int) -> list[str]:
        """Name the workers that need not be built any more, the last asked for first."""
        surplus = len(self._number) - num_wanted
        return sorted(self._building, key=lambda name: -self._started_at(name))[: max(0, surplus)]

    def num_coming(self, now: float) -> int:
        """Count the workers that are being built and not overdue."""
        return sum(now - self._started_at(name) < PATIENCE_S for name in self._building)

    def seat(self, worker: str) -> int:
        """Return the number of a worker's seat, from 1, which its successor takes over."""
        return self._number[worker] + 1

    def let_go(self, worker: str) -> None:
        """Note that a worker was ended because it is of no use any more."""
        self._empty(worker)

    def ready(self, worker: str) -> None:
        """Note that a worker's models are loaded."""
        self._seat(worker).num_failures = 0
        self._building.discard(worker)
        self._ready[worker] = None

    def leave_out(self, worker: str) -> None:
        """Keep a worker that takes no documents, because its successor would run at the same place."""
        self._ready.pop(worker, None)

    def failed(self, worker: str, reason: str, now: float) -> float:
        """Note that a worker could not be built. Returns the seconds until the next try.

        Raises WorkersFailError after too many failures.
        """
        seat = self._empty(worker)
        seat.num_failures += 1
        if seat.num_failures >= MAX_FAILED_STARTS and not self.num_ready:
            raise WorkersFailError(f"workers cannot be built, {seat.num_failures} tries in a row failed: {reason}")
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (seat.num_failures - 1))
        seat.not_before = now + pause
        return pause

    def died(self, worker: str, reason: str, *, is_explained: bool = False) -> None:
        """Note that a worker which had been ready is gone. Raises WorkersFailError if workers only die.

        is_explained: others have died over its documents. Such documents run at the end, when nothing else gets done
        in between, so such deaths count only if no document was ever done.
        """
        self._empty(worker)
        if is_explained and self._is_of_use:
            return
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            died = counted(self._num_fruitless, "worker") + " died"
            raise WorkersFailError(f"{died} and no document was done between: {reason}")

    def document_done(self) -> None:
        """Note that a document is done, so that the workers are of use."""
        self._is_of_use = True
        self._num_fruitless = 0

    def _seat(self, worker: str) -> _Seat:
        return self._seats[self._number[worker]]

    def _started_at(self, worker: str) -> float:
        return self._seat(worker).started_at

    def _empty(self, worker: str) -> _Seat:
        """Leave a worker's seat to its successor."""
        number = self._number.pop(worker)
        self._building.discard(worker)
        self._ready.pop(worker, None)
        bisect.insort(self._vacant, number)
        self._seats[number].worker = None
        return self._seats[number]
