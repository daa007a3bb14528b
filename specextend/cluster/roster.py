"""Which workers to start when: replaced when they die, with a growing pause while they cannot be built. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specextend.cluster.exits import WorkersFailError
from specextend.cluster.places import Coming

MAX_FAILED_STARTS = 5
"""Constructions that fail in a row on one seat, with no worker up, before the run is given up."""
MAX_FRUITLESS_DEATHS = 50
"""Workers that die in a row without one document done between before the run is given up."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
PATIENCE_S = 600.0
"""Seconds that a worker which is being built is waited for; a cluster may have no room for it."""


@dataclass(slots=True)
class _Seat:
    """One of the run's workers, whoever fills it now."""

    worker: str | None = None
    is_ready: bool = False
    is_left_out: bool = False
    is_new: bool = True
    """Whether nobody was ever ready there."""
    num_failures: int = 0
    not_before: float = 0.0
    started_at: float = 0.0

    def clear(self) -> None:
        """Nobody fills it."""
        self.worker, self.is_ready, self.is_left_out = None, False, False


class Roster:
    """Keeps up to `size` workers alive."""

    def __init__(self, size: int) -> None:
        self._seats = [_Seat() for _ in range(size)]
        self._num_started = 0
        self._num_fruitless = 0
        self._is_of_use = False

    @property
    def num_ready(self) -> int:
        """Workers that take leases."""
        return sum(seat.is_ready for seat in self._seats)

    def due(self, now: float, num_wanted: int) -> list[str]:
        """Names of new workers to start now; no more workers in all than are wanted."""
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
        """Its models are loaded."""
        seat = self._seat(worker)
        seat.is_ready, seat.is_new, seat.num_failures = True, False, 0

    def leave_out(self, worker: str) -> None:
        """Keep a worker that takes no documents: whoever came in its stead would get what it runs on."""
        seat = self._seat(worker)
        seat.is_ready, seat.is_left_out = False, True

    def failed(self, worker: str, reason: str, now: float) -> float:
        """It could not be built: seconds until the next try. Raises WorkersFailError after too many."""
        seat = self._seat(worker)
        seat.clear()
        seat.num_failures += 1
        if seat.num_failures >= MAX_FAILED_STARTS and not self.num_ready:
            raise WorkersFailError(f"workers cannot be built, {seat.num_failures} tries in a row failed: {reason}")
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (seat.num_failures - 1))
        seat.not_before = now + pause
        return pause

    def died(self, worker: str, reason: str, *, is_explained: bool = False) -> None:
        """A worker that had been ready is gone. Raises WorkersFailError when all of them die over nothing.

        is_explained: over documents that others have died over. They are left for the end of a run, where nothing is
        done between: such deaths count only where no document was ever done.
        """
        seat = self._seat(worker)
        seat.clear()
        if is_explained and self._is_of_use:
            return
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            raise WorkersFailError(f"{self._num_fruitless} workers died and no document was done between: {reason}")

    def document_done(self) -> None:
        """The workers are of use."""
        self._is_of_use = True
        self._num_fruitless = 0

    def _seat(self, worker: str) -> _Seat:
        return next(seat for seat in self._seats if seat.worker == worker)
