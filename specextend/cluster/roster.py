"""Which workers to start when: replaced when they die, with a growing pause while they cannot be built. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specextend.cluster.exits import WorkersFailError

MAX_FAILED_STARTS = 5
"""Constructions that fail in a row on one place, with no worker up, before the run is given up."""
MAX_FRUITLESS_DEATHS = 50
"""Workers that die in a row without one document done between before the run is given up."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Place:
    """One of the run's workers, whoever fills it now."""

    worker: str | None = None
    is_ready: bool = False
    num_failures: int = 0
    not_before: float = 0.0


class Roster:
    """Keeps up to `size` workers alive."""

    def __init__(self, size: int) -> None:
        self._places = [_Place() for _ in range(size)]
        self._num_started = 0
        self._num_fruitless = 0

    @property
    def num_ready(self) -> int:
        """Workers that take leases."""
        return sum(place.is_ready for place in self._places)

    def due(self, now: float, num_open: int) -> list[str]:
        """Names of new workers to start now; no more workers than there are open documents."""
        names: list[str] = []
        num_alive = sum(place.worker is not None for place in self._places)
        for place in self._places:
            if place.worker is None and place.not_before <= now and num_alive + len(names) < num_open:
                self._num_started += 1
                place.worker = f"worker-{self._num_started}"
                names.append(place.worker)
        return names

    def ready(self, worker: str) -> None:
        """Its constructor is through."""
        place = self._place(worker)
        place.is_ready, place.num_failures = True, 0

    def failed(self, worker: str, reason: str, now: float) -> float:
        """Its constructor failed: seconds until the next try. Raises WorkersFailError after too many."""
        place = self._place(worker)
        place.worker, place.is_ready = None, False
        place.num_failures += 1
        if place.num_failures >= MAX_FAILED_STARTS and not self.num_ready:
            raise WorkersFailError(f"workers cannot be built, {place.num_failures} tries in a row failed: {reason}")
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (place.num_failures - 1))
        place.not_before = now + pause
        return pause

    def died(self, worker: str, reason: str) -> None:
        """A worker that had been ready is gone. Raises WorkersFailError when all of them die over nothing."""
        place = self._place(worker)
        place.worker, place.is_ready = None, False
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS_DEATHS:
            raise WorkersFailError(f"{self._num_fruitless} workers died and no document was done between: {reason}")

    def document_done(self) -> None:
        """The workers are of use."""
        self._num_fruitless = 0

    def _place(self, worker: str) -> _Place:
        return next(place for place in self._places if place.worker == worker)
