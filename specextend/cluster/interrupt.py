"""Being told to stop: SIGTERM, SIGINT, or the job's deadline. Finished work is committed, then exit 75."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from specextend.cluster.exits import EXIT_INTERRUPTED, InterruptedRunError

LAST_S = 3.0
"""Seconds that the last call before the process is ended may take."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Remembers that the run was told to stop. Check it often: nothing is stopped by itself.

    `grace_s` after that the process ends with 75 whatever it is doing, so that no one has to kill it: also where the
    main thread is inside a library and runs no signal handler.
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
        self._wakeup: int | None = None
        """Where the system writes the number of each signal at once, whatever the main thread does."""
        threading.Thread(target=self._watch, name="grace", daemon=True).start()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT. Call it again after ray.init(), which installs handlers of its own."""
        if self._wakeup is None:
            heard, self._wakeup = os.pipe()
            os.set_blocking(self._wakeup, False)
            threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True).start()
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._handle)

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

    def _listen(self, heard: int) -> None:
        while numbers := os.read(heard, 64):
            for number in set(_SIGNALS).intersection(numbers):
                self._handle(number, None)

    def _watch(self) -> None:
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if not self._told.wait(left_s):
            self.tell("job.deadline_s has passed")
        if not self._over.wait(self._grace_s):
            end_process(EXIT_INTERRUPTED, self.last)


def end_process(code: int, last: Callable[[], object]) -> None:
    """End the process from any thread, whatever the others do, after a call that may raise or never come back."""

    def leave() -> None:
        try:
            last()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(LAST_S)
    os._exit(code)
