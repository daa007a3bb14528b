"""The driver's clock: it counts the time in which the driver could see what its workers did. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_GAP_S = 10.0
"""Seconds between two looks at the clock that count at most."""


class AwakeClock:
    """Counts the seconds that pass while the driver turns.

    A process that was suspended, or a machine that was, finds no worker silent and no document overdue when it wakes:
    it has not been looking. So a gap between two looks counts for `MAX_GAP_S` at most, and a step back for nothing.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        """`source` gives seconds that may jump."""
        self._source = source
        self._last = source()
        self._now = 0.0

    def __call__(self) -> float:
        """Return the seconds since the clock was made, without the gaps."""
        seconds = self._source()
        self._now += min(max(0.0, seconds - self._last), MAX_GAP_S)
        self._last = seconds
        return self._now
