"""Whose fault is it that a worker could not read a document? The driver looks for itself."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

from specextend.core import DocumentKey
from specextend.data.inputs import DocumentError, InputUnreachableError
from specextend.data.parquet import DAMAGED
from specextend.data.source import Source

PATIENCE_S = 1.0
"""Seconds after which a look is a long one, and all looks of a turn together are enough."""
LOOK_S = 30.0
"""Seconds that a look may take; a store that has not answered by then answers nobody."""

Value = TypeVar("Value")


class Ruling(Enum):
    """What the driver found."""

    READABLE = auto()
    """The worker is at fault, or its node."""
    DAMAGED = auto()
    """The document is."""
    OUT_OF_REACH = auto()
    """The store is."""


class Arbiter:
    """Reads documents again, in a thread of its own: a file system that does not answer holds the driver briefly.

    before_long: called when a look is a long one, for what must not wait.
    """

    def __init__(self, source: Source, before_long: Callable[[], object]) -> None:
        self._source, self._before_long = source, before_long
        self._thread: threading.Thread | None = None
        self._spent_s = 0.0

    @property
    def is_tired(self) -> bool:
        """Whether it has looked long enough for a turn of the driver."""
        return self._spent_s >= PATIENCE_S

    def rest(self) -> None:
        """A turn begins."""
        self._spent_s = 0.0

    def judge(self, key: DocumentKey) -> Ruling:
        """Read a document. Raises InputChangedError where its file is another one than when the run began."""
        return self._within(lambda source: _judge(source, key), Ruling.OUT_OF_REACH)

    def doc_id(self, key: DocumentKey) -> str:
        """A document's id, or its place where the id cannot be read. Raises InputChangedError."""
        return self._within(lambda source: source.doc_id(key), self._source.place(key))

    def _within(self, look: Callable[[Source], Value], otherwise: Value) -> Value:
        """What a look finds, raising what it raises; `otherwise` while it, or one before it, takes too long."""
        if self._thread is not None and self._thread.is_alive():
            return otherwise
        found: list[Value] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                found.append(look(copy.copy(self._source)))  # nothing remembered, and locks of its own
            except Exception as error:  # noqa: BLE001  the driver raises it, whatever it is
                failed.append(error)

        began = time.monotonic()
        self._thread = threading.Thread(target=run, name="arbiter", daemon=True)
        self._thread.start()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._before_long()
            self._thread.join(LOOK_S)
        self._spent_s += time.monotonic() - began
        if failed:
            raise failed[0]
        return found[0] if found else otherwise


def _judge(source: Source, key: DocumentKey) -> Ruling:
    try:
        source.check_unchanged(key.file)
        source.read(key)
    except InputUnreachableError:
        return Ruling.OUT_OF_REACH
    except DAMAGED as error:
        is_reached = source.opens(key.file) and not isinstance(error, MemoryError)
        return Ruling.DAMAGED if is_reached else Ruling.OUT_OF_REACH
    except DocumentError:  # such as a null text: a worker that reads it says so
        return Ruling.READABLE
    return Ruling.READABLE
