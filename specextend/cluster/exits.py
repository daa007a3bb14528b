"""Exit codes, their exceptions, and requests to stop."""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

from specextend.core import first_line
from specextend.data.inputs import InputUnreachableError
from specextend.data.storage import Location, is_passing
from specextend.folders import remove_all

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_TOO_MANY_ERRORS = 3
EXIT_LOCKED = 4
EXIT_OTHER_RUN = 5
EXIT_INTERRUPTED = 75
GRACE_S = 20.0
"""Seconds to commit finished work after a request to stop."""
LAST_S = 3.0
"""Seconds for each last call before the process is killed."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RunError(Exception):
    """End of a run, with a message for the user. Committed work is kept."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, exit_code: int | None = None):
        super().__init__(message)
        self.exit_code = exit_code or self.exit_code


class RefusedError(RunError, ValueError):
    """Unusable configuration or input, reported before a model is loaded."""

    exit_code = EXIT_REFUSED


class OtherRunError(RunError, ValueError):
    """The output folder belongs to another run."""

    exit_code = EXIT_OTHER_RUN


class OutputError(RunError):
    """The output folder cannot be read or written."""


class InterruptedRunError(Exception):
    """The run was told to stop; run again to resume."""

    exit_code = EXIT_INTERRUPTED


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that ended with `error`."""
    return error.exit_code if isinstance(error, RunError | InterruptedRunError) else EXIT_FAILED


def exit_code_of_command(error: ValueError | OSError) -> int:
    """Return 1 if a later try may succeed, else 2; for commands without a run."""
    from specextend.models.model_files import HubUnreachableError  # it imports huggingface_hub

    is_store = isinstance(error, InputUnreachableError | HubUnreachableError) or (
        isinstance(error, OSError) and is_passing(error)
    )
    return EXIT_FAILED if is_store else EXIT_REFUSED


def reading(output: Location) -> AbstractContextManager[None]:
    """Convert OSError to OutputError around reads."""
    return writing(output, "cannot be read")


@contextmanager
def writing(output: Location, what: str = "cannot be written to") -> Iterator[None]:
    """Convert OSError to OutputError around writes."""
    try:
        yield
    except OSError as error:
        message = f"{output.path} {what}: {first_line(error)}"
        raise OutputError(f"{message}; committed work is kept, run again to resume") from error


class Interrupt:
    """A request to stop the run, to be polled with `check`.

    After `GRACE_S` the process ends itself with exit code 75, even while the main thread is stuck
    in a library and cannot run signal handlers.
    """

    def __init__(self, grace_s: float | None = None, deadline_s: float = 0.0):
        """Watch for requests.

        Args:
            grace_s: Replaces `GRACE_S`.
            deadline_s: Seconds until the run is told to stop; 0 sets no deadline.
        """
        self.last: Callable[[], None] = lambda: None
        """Last call before the process is killed, on another thread."""
        self._grace_s = GRACE_S if grace_s is None else grace_s
        self.reason = ""
        self._told = threading.Event()
        self._over = threading.Event()
        self._wakeup: int | None = None
        """Pipe for signal numbers, filled even if the main thread is stuck."""
        threading.Thread(
            target=self._watch, args=(deadline_s or None,), name="grace", daemon=True
        ).start()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT, again after ray.init(), which replaces the handlers."""
        if threading.current_thread() is not threading.main_thread():
            _thread.interrupt_main(signal.SIGURG)
            return
        signal.signal(signal.SIGURG, lambda *_: self.install())
        if self._wakeup is None:
            heard, self._wakeup = os.pipe()
            os.set_blocking(self._wakeup, False)
            threading.Thread(
                target=self._listen, args=(heard,), name="signals", daemon=True
            ).start()
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def check(self) -> None:
        """Raise InterruptedRunError if told to stop."""
        if self.reason:
            raise InterruptedRunError(self.reason)

    def tell(self, reason: str) -> None:
        """Request a stop."""
        self.reason = self.reason or reason
        self._told.set()

    def disarm(self) -> None:
        """Stop watching, because the run has ended."""
        self._over.set()
        self._told.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.tell(f"{signal.Signals(number).name} received")

    def _listen(self, heard: int) -> None:
        while numbers := os.read(heard, 64):
            for number in set(_SIGNALS).intersection(numbers):
                self._handle(number, None)

    def _watch(self, deadline_s: float | None) -> None:
        if not self._told.wait(deadline_s):
            self.tell("job.deadline_s has passed")
        if not self._over.wait(self._grace_s):
            end_process(EXIT_INTERRUPTED, self.last)


def end_process(code: int, last: Callable[[], object]) -> None:
    """End the process from any thread, after a last call that may raise or hang."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    # without its folder, Ray's processes end and kill this one
    for call in (last, flush, remove_all):
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(LAST_S)
    os._exit(code)
