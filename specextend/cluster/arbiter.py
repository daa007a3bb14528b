"""Whose fault is it that a worker could not read a document? The driver looks for itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

from specextend.core import DocumentKey
from specextend.data.documents import DocumentError, Source
from specextend.data.inputs import InputChangedError, InputUnreachableError
from specextend.data.parquet import DAMAGED

LOOK_S = 30.0
"""Seconds that a look may take; a store that has not answered by then answers nobody."""

Value = TypeVar("Value")


class Verdict(Enum):
    """What the driver found."""

    READABLE = auto()
    """The worker is at fault, or its node."""
    DAMAGED = auto()
    """The document is."""
    OUT_OF_REACH = auto()
    """The store is."""


class Arbiter:
    """Reads documents again, in a thread of its own: a file system that never answers holds the driver once."""

    def __init__(self, source: Source) -> None:
        self._source = copy.copy(source)  # its own lock: a thread that hangs must not hold it against others
        self._thread: threading.Thread | None = None

    def judge(self, key: DocumentKey) -> Verdict:
        """Read a document. Raises InputChangedError where its file is another one than when the run began."""
        return self._within(lambda: self._judge(key), Verdict.OUT_OF_REACH)

    def doc_id(self, key: DocumentKey) -> str:
        """A document's id, or its place in the input where the id cannot be read."""
        return self._within(lambda: self._source.doc_id(key), self._source.place(key))

    def _judge(self, key: DocumentKey) -> Verdict:
        try:
            self._source.check_unchanged(key.file)
            self._source.read(key)
        except InputUnreachableError:
            return Verdict.OUT_OF_REACH
        except DAMAGED:
            return Verdict.DAMAGED
        except DocumentError:  # such as a null text: a worker that reads it says so
            return Verdict.READABLE
        return Verdict.READABLE

    def _within(self, look: Callable[[], Value], otherwise: Value) -> Value:
        """What a look finds, raising what it raises; `otherwise` while it, or one before it, takes too long."""
        if self._thread is not None and self._thread.is_alive():
            return otherwise
        found: list[Value] = []
        failed: list[InputChangedError] = []

        def run() -> None:
            try:
                found.append(look())
            except InputChangedError as error:
                failed.append(error)

        self._thread = threading.Thread(target=run, name="arbiter", daemon=True)
        self._thread.start()
        self._thread.join(LOOK_S)
        if failed:
            raise failed[0]
        return found[0] if found else otherwise
