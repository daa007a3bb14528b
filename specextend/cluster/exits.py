"""The end of a run: exit codes, the exceptions that stand for them, and requests to stop.

SIGTERM, SIGINT or the job's deadline ask the run to stop: finished work is committed, then it exits
with 75.
"""

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
"""Seconds that a run which was told to stop has to commit finished work before its process is ended
by force.
"""
LAST_S = 3.0
"""Seconds that the last call may take before the process is ended by force."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RunError(Exception):
    """An end of a run whose message tells the user what to do: it is printed without a traceback.

    Its code is 1 where no other is given: no Ray, no worker, no store. What is done is kept.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, exit_code: int | None = None):
        super().__init__(message)
        self.exit_code = exit_code or self.exit_code


class RefusedError(RunError, ValueError):
    """A configuration or an input that cannot be run, said in one line before a model is loaded:
    exit 2.
    """

    exit_code = EXIT_REFUSED


class OtherRunError(RunError, ValueError):
    """The output folder belongs to another run, and the message says what differs: exit 5."""

    exit_code = EXIT_OTHER_RUN


class OutputError(RunError):
    """The output folder cannot be read or written: exit 1. Committed work is kept; run again to
    resume.
    """


class InterruptedRunError(Exception):
    """The run was told to stop: exit 75. Run again to resume."""

    exit_code = EXIT_INTERRUPTED


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that ended with this exception."""
    return error.exit_code if isinstance(error, RunError | InterruptedRunError) else EXIT_FAILED


def exit_code_of_command(error: ValueError | OSError) -> int:
    """Return the exit code of a command that ended with an error which is no RunError: 1 if a later
    try may succeed.
    """
    from specextend.model_files import HubUnreachableError  # it imports huggingface_hub

    is_store = isinstance(error, InputUnreachableError | HubUnreachableError) or (
        isinstance(error, OSError) and is_passing(error)
    )
    return EXIT_FAILED if is_store else EXIT_REFUSED


def reading(output: Location) -> AbstractContextManager[None]:
    """Open a block that reads what a run has written. Raises OutputError if the file system
    refuses.
    """
    return writing(output, "cannot be read")


@contextmanager
def writing(output: Location, what: str = "cannot be written to") -> Iterator[None]:
    """Open a block that writes to an output folder. Raises OutputError if the file system
    refuses.
    """
    try:
        yield
    except OSError as error:
        message = f"{output.path} {what}: {first_line(error)}"
        raise OutputError(f"{message}; what was committed is there, run again to resume") from error


class Interrupt:
    """A flag that the run was told to stop. Call `check` often: the flag alone stops nothing.

    If the run has not stopped `GRACE_S` later, the process ends itself with 75, so that nobody has
    to kill it. This works even while the main thread is inside a library and runs no signal
    handler.
    """

    def __init__(self, grace_s: float | None = None, deadline_s: float = 0.0):
        """Watch for requests to stop.

        grace_s: in place of GRACE_S. deadline_s: seconds from now after which the run is told to
        stop; 0: never.
        """
        self.last: Callable[[], None] = lambda: None
        """The last call before the process is ended by force; it runs on another thread and must be
        quick.
        """
        self._grace_s = GRACE_S if grace_s is None else grace_s
        self.reason = ""
        """Why the run was told to stop; empty if it was not."""
        self._told = threading.Event()
        self._over = threading.Event()
        self._wakeup: int | None = None
        """The pipe into which the system writes the number of each signal at once, whatever the
        main thread does.
        """
        threading.Thread(
            target=self._watch, args=(deadline_s or None,), name="grace", daemon=True
        ).start()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT. Call it again after ray.init(), which installs handlers of
        its own.
        """
        if threading.current_thread() is not threading.main_thread():  # which alone can
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
        """Raise InterruptedRunError once the run was told to stop."""
        if self.reason:
            raise InterruptedRunError(self.reason)

    def tell(self, reason: str) -> None:
        """Tell the run to stop."""
        self.reason = self.reason or reason
        self._told.set()

    def disarm(self) -> None:
        """Leave the process alone from now on, because the run has ended by itself."""
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
    """End the process from any thread, whatever the others do, after a last call that may raise or
    never return.
    """

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    # The folder of a Ray last: without it Ray's processes end, and take this one along.
    for call in (last, flush, remove_all):
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(LAST_S)
    os._exit(code)
