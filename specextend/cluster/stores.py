"""Calls to stores that fail or never answer: how long each may take, what is said then, and whose fault it is.

A store is the file system or object store of the input, of the output or of the models.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from specextend.cluster.exits import OutputError, StoreError
from specextend.core import DocumentKey, first_line
from specextend.data.inputs import DocumentError, InputUnreachableError
from specextend.data.parquet import DAMAGED
from specextend.data.source import Source
from specextend.data.storage import Location, is_uri, resolve

CHECKPOINT_EVERY_S = 0.1
"""Seconds between two calls of a checkpoint while a store is waited for."""
CHECKS = 20
"""Checks of a request that has made no progress before the run is given up."""
PATIENCE_S = 1.0
"""Seconds of re-reading that one turn of the driver may spend; finished rows are committed before it takes longer."""
REREAD_S = 30.0
"""Seconds that a re-read may take after that; a store that has not answered by then is out of reach for everybody."""

Value = TypeVar("Value")


def in_background(call: Callable[[], Value]) -> Future[Value]:
    """Start a call in a thread that nobody has to wait for: if the call never returns, the thread is left behind."""
    answer: Future[Value] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001  whoever asks for the result gets it, whatever it is
            answer.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return answer


def within(limit_s: float, call: Callable[[], Value], checkpoint: Callable[[], object] = lambda: None) -> Value:
    """Return or raise what `call` does. Raises TimeoutError if it takes longer than `limit_s`.

    checkpoint: called meanwhile; may raise. Signal handlers run as well, which a call into a library would prevent.
    """
    answer = in_background(call)
    give_up_at = time.monotonic() + limit_s
    while not answer.done():
        checkpoint()
        if time.monotonic() >= give_up_at:
            raise TimeoutError(f"no answer for {limit_s:g} s")
        wait([answer], CHECKPOINT_EVERY_S)
    return answer.result()


def knock(key: str, path: str, limit_s: float, checkpoint: Callable[[], object] = lambda: None) -> None:
    """Ask the store of a path for something, once. Raises StoreError if no answer comes.

    Ignores what is wrong with the path itself: whoever uses it says so. key: names the path in messages.
    """

    def ask() -> None:
        location = resolve(path)
        location.filesystem.get_file_info(location.path)

    try:
        within(limit_s, ask, checkpoint)
    except ValueError:
        return
    except OSError as error:
        if is_uri(path) or isinstance(error, TimeoutError):
            said = first_line(error)  # of `resolve`, which names the path, or of a library, which does not
            if not said.startswith(f"{path} cannot be reached"):
                said = f"{path} cannot be reached: {said}; run again"
            raise StoreError(f"{key} {said}") from error


class Fence(Protocol):
    """Something that knows whether the output folder is ours: the lock."""

    def check(self) -> None:
        """Raise if the folder is not ours."""


class OutputGate:
    """The gate that all reads and writes of a run's output folder pass, as `Location.gate`.

    Inside a `using` block the store must answer each request within `limit_s`. If it does not, `give_up` is called on
    another thread, because the thread that waits cannot be stopped. Time in which the process itself was suspended
    does not count.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], object]) -> None:
        self.fence: Fence | None = None
        """The lock, once it is held."""
        self._limit_s, self._give_up = limit_s, give_up
        self._num_requests = self._depth = 0
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="output watch", daemon=True).start()

    def touch(self) -> None:
        """Note that a request begins, or that there was progress between two requests."""
        self._num_requests += 1

    def check(self) -> None:
        """Raise if the folder is not ours."""
        if self.fence is not None:
            self.fence.check()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Open a block in which the store may be asked, and must answer in time."""
        self.touch()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()

    def _watch(self) -> None:
        seen = num_checks = 0
        while not self._closing.wait(self._limit_s / CHECKS):
            if self._depth and self._num_requests == seen:
                num_checks += 1
            else:
                seen, num_checks = self._num_requests, 0
            if num_checks >= CHECKS:
                self._give_up()
                return


def using(output: Location) -> AbstractContextManager[None]:
    """Open a block that uses an output folder, watched if its location passes a gate."""
    return output.gate.using() if isinstance(output.gate, OutputGate) else nullcontext()


def writing(output: Location) -> AbstractContextManager[None]:
    """Open a block that writes to an output folder. Raises OutputError if the file system refuses."""
    return _refused(output, "cannot be written to")


def reading(output: Location) -> AbstractContextManager[None]:
    """Open a block that reads what a run has written. Raises OutputError if the file system refuses."""
    return _refused(output, "cannot be read")


@contextmanager
def _refused(output: Location, what: str) -> Iterator[None]:
    try:
        with using(output):
            yield
    except OSError as error:
        message = f"{output.path} {what}: {first_line(error)}"
        raise OutputError(f"{message}; what was committed is there, run again to resume") from error


class Ruling(Enum):
    """The party at fault if a worker could not read a document."""

    READABLE = auto()
    """The worker or its node: the driver can read the document."""
    DAMAGED = auto()
    """The document."""
    OUT_OF_REACH = auto()
    """The store."""


class Arbiter:
    """Reads documents again in the driver, to find out why a worker could not.

    A store that does not answer holds the driver up for `patience_s` + `reread_s` once, and then not again until the
    read that hangs has returned.
    """

    def __init__(
        self,
        source: Source,
        before_long: Callable[[], object],
        patience_s: float = PATIENCE_S,
        reread_s: float = REREAD_S,
    ) -> None:
        """Keep the source. before_long: called before a wait longer than `patience_s`, for what it must not delay."""
        self._source, self._before_long = source, before_long
        self._patience_s, self._reread_s = patience_s, reread_s
        self._answer: Future[Any] | None = None
        self._spent_s = 0.0

    @property
    def is_spent(self) -> bool:
        """Return True once this turn's re-read budget is spent."""
        return self._spent_s >= self._patience_s

    def begin_turn(self) -> None:
        """Renew the re-read budget at the beginning of a turn of the driver."""
        self._spent_s = 0.0

    def judge(self, key: DocumentKey) -> Ruling:
        """Read a document again. Raises InputChangedError if its file is not the one with which the run began."""
        return self._reread(lambda source: _judge(source, key), Ruling.OUT_OF_REACH)

    def doc_id(self, key: DocumentKey) -> str:
        """Read a document's id; return its file and row if the id cannot be read. Raises InputChangedError."""
        return self._reread(lambda source: source.doc_id(key), self._source.place(key))

    def _reread(self, read: Callable[[Source], Value], otherwise: Value) -> Value:
        """Return or raise what `read` does; return `otherwise` while it, or a read before it, takes too long."""
        if self._answer is not None and not self._answer.done():
            return otherwise
        began = time.monotonic()
        answer = in_background(lambda: read(copy.copy(self._source)))  # without cached rows, and with its own locks
        self._answer = answer
        wait([answer], self._patience_s)
        if not answer.done():
            self._before_long()
            wait([answer], self._reread_s)
        self._spent_s += time.monotonic() - began
        return answer.result() if answer.done() else otherwise


def _judge(source: Source, key: DocumentKey) -> Ruling:
    try:
        source.check_unchanged(key.file)
        source.read(key)
    except InputUnreachableError:
        return Ruling.OUT_OF_REACH
    except DAMAGED as error:
        is_reached = source.opens(key.file) and not isinstance(error, MemoryError)
        return Ruling.DAMAGED if is_reached else Ruling.OUT_OF_REACH
    except DocumentError:  # such as a null text: a worker that reads the document reports it
        return Ruling.READABLE
    return Ruling.READABLE
