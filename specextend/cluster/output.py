"""The output folder as a run may use it: nothing is written once the lock is lost, and nobody waits for it for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from specextend.cluster.exits import OutputError
from specextend.core import first_line
from specextend.data.storage import Location

LOOKS = 20
"""Looks at a request before it has taken too long."""


class Fence(Protocol):
    """Knows whether the folder is ours: the lock."""

    def check(self) -> None:
        """Raise where it is not."""


class OutputGate:
    """All reads and writes of a run's output folder pass here, as `Location.gate`.

    Inside a `using` block the store must answer each request within `limit_s`, or `give_up` is called, on another
    thread: the one that waits cannot be stopped. Time in which the process itself was suspended does not count.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], object]) -> None:
        self.fence: Fence | None = None
        """Set once the lock is held."""
        self._limit_s, self._give_up = limit_s, give_up
        self._num_requests = self._depth = 0
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="output watch", daemon=True).start()

    def touch(self) -> None:
        """A request begins, or there was progress between two."""
        self._num_requests += 1

    def check(self) -> None:
        """Raise where the folder is not ours."""
        if self.fence is not None:
            self.fence.check()

    @contextmanager
    def using(self) -> Iterator[None]:
        """A block in which the store may be asked, and must answer."""
        self.touch()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def close(self) -> None:
        """Watch no longer."""
        self._closing.set()

    def _watch(self) -> None:
        seen = num_looks = 0
        while not self._closing.wait(self._limit_s / LOOKS):
            if self._depth and self._num_requests == seen:
                num_looks += 1
            else:
                seen, num_looks = self._num_requests, 0
            if num_looks >= LOOKS:
                self._give_up()
                return


def using(output: Location) -> AbstractContextManager[None]:
    """A block that uses an output folder, watched where its location passes a gate."""
    return output.gate.using() if isinstance(output.gate, OutputGate) else nullcontext()


def writing(output: Location) -> AbstractContextManager[None]:
    """A block that writes to an output folder. Raises OutputError for what the file system has against it."""
    return _said(output, "cannot be written to")


def reading(output: Location) -> AbstractContextManager[None]:
    """A block that reads what a run has written. Raises OutputError where the file system does not give it."""
    return _said(output, "cannot be read")


@contextmanager
def _said(output: Location, what: str) -> Iterator[None]:
    try:
        with using(output):
            yield
    except OSError as error:
        message = f"{output.path} {what}: {first_line(error)}"
        raise OutputError(f"{message}; what was committed is there, run again to resume") from error
