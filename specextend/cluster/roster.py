"""The roster of workers: which to start when, and when to give the run up because workers fail. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specextend.cluster.exits import WorkersFailError
from specextend.cluster.places import Coming

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
    is_ready: bool = False
    is_left_out: bool = False
    is_new: bool = True
    """True until a worker was ready there."""
    num_failures: int = 0
    not_before: float = 0.0
    started_at: float = 0.0

    def clear(self) -> None:
        """Empty the seat."""
        self.worker, self.is_ready, self.is_left_out = None, False, False


class Roster:
    """Up to `size` workers: each that dies is replaced, after a growing pause if the new one cannot be built."""

    def __init__(self, size: int) -> None:
        self._seats = [_Seat() for _ in range(size)]
        self._num_started = 0
        self._num_fruitless = 0
        self._is_of_use = False

    @property
    def num_ready(self) -> int:
        """Count the workers that take leases."""
        return sum(seat.is_ready for seat in self._seats)

    def ready_workers(self) -> list[str]:
        """Name the workers that take leases."""
        return [seat.worker for seat in self._seats if seat.worker is not None and seat.is_ready]

    def due(self, now: float, num_wanted: int) -> list[str]:
        """Name the new workers to start now, so that there are no more in all than are wanted."""
        names: list[str] = []
        num_alive = sum(seat.worker is not None for seat in self._seats)
        for seat in self._seats:
            if seat.worker is None and seat.not_before <= now and num_alive + len(names) < num_wanted:
                self._num_started += 1
                seat.worker, seat.started_at = f"worker-{self._num_started}", now
                names.append(seat.worker)
        return names

    def coming(self, now: float) -> Coming:
        """Count the workers that are being built and not overdue."""
        building = (seat for seat in self._seats if seat.worker and not (seat.is_ready or seat.is_left_out))
        coming = [seat for seat in building if now - seat.started_at < PATIENCE_S]
        return Coming(len(coming), sum(seat.is_new for seat in coming))

    def seat(self, worker: str) -> int:
        """Return the number of a worker's seat, from 1, which its successor takes over."""
        return next(number for number, seat in enumerate(self._seats, start=1) if seat.worker == worker)

    def ready(self, worker: str) -> None:
        """Note that a worker's models are loaded."""
        seat = self._seat(worker)
        seat.is_ready, seat.is_new, seat.num_failures = True, False, 0

    def leave_out(self, worker: str) -> None:
        """Keep a worker that takes no documents, because its successor would run at the same place."""
        seat = self._seat(worker)
        seat.is_ready, seat.is_left_out = False, True

    def failed(self, worker: str, reason: str, now: float) -> float:
        """Note that a worker could not be built. Returns the seconds until the next try.

        Raises WorkersFailError after too many failures.
        """
        seat = self._seat(worker)
        seat.clear()
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
        seat = self._seat(worker)
        seat.clear()
        if is_explained and self._is_of_use:
            return
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            raise WorkersFailError(f"{self._num_fruitless} workers died and no document was done between: {reason}")

    def document_done(self) -> None:
        """Note that a document is done, so that the workers are of use."""
        self._is_of_use = True
        self._num_fruitless = 0

    def _seat(self, worker: str) -> _Seat:
        return next(seat for seat in self._seats if seat.worker == worker)
