"""SIGTERM, SIGINT and the job's own deadline: finished work is committed, then exit 75."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from specextend.cluster.exits import EXIT_INTERRUPTED, InterruptedRunError

LAST_S = 3.0
"""Seconds that the last call before the process is ended may take."""


class Interrupt:
    """Remembers that the run was told to stop. Check it often: nothing is stopped by itself.

    `grace_s` after that the process ends with 75 whatever it is doing, so that no one has to kill it.
    """

    def __init__(self, grace_s: float, deadline_s: float = 0.0) -> None:
        """`deadline_s`: seconds from now after which the run is told to stop; 0: never."""
        self.last: Callable[[], None] = lambda: None
        """Called before the process is ended so, on another thread: it must be quick."""
        self._grace_s = grace_s
        self._deadline = time.monotonic() + deadline_s if deadline_s else None
        self._reason: str | None = None
        self._told = threading.Event()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="grace", daemon=True).start()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT. Call it again after ray.init(), which installs handlers of its own."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def check(self) -> None:
        """Raise InterruptedRunError once the run was told to stop."""
        if self._reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.tell("job.deadline_s has passed")
        if self._reason is not None:
            raise InterruptedRunError(self._reason)

    def tell(self, reason: str) -> None:
        """Tell the run to stop."""
        self._reason = self._reason or reason
        self._told.set()

    def disarm(self) -> None:
        """The run has ended by itself: do not end the process any more."""
        self._over.set()
        self._told.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.tell(f"{signal.Signals(number).name} received")

    def _watch(self) -> None:
        self._told.wait()
        if not self._over.wait(self._grace_s):
            last = threading.Thread(target=self.last, daemon=True)  # it may raise, or wait for a dead file system
            last.start()
            last.join(LAST_S)
            os._exit(EXIT_INTERRUPTED)
