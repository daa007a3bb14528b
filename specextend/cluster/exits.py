"""How a run ends, as an exit code and as the exception that says so."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_TOO_MANY_ERRORS = 3
EXIT_LOCKED = 4
EXIT_OTHER_RUN = 5
EXIT_INTERRUPTED = 75


class RefusedError(ValueError):
    """A configuration or an input that cannot be run, in one line: exit 2. No model was loaded."""


class LockHeldError(RuntimeError):
    """Another driver holds the output folder and is alive: exit 4."""


class LockLostError(LockHeldError):
    """Another driver took the output folder over while this one did not beat: nothing more may be committed."""


class LockGoneError(RuntimeError):
    """Somebody removed the lock, perhaps a driver that took over and is done: exit 1. Nothing more may be committed."""


class OtherRunError(ValueError):
    """The output folder belongs to another run: exit 5. The message says what differs."""


class WorkersFailError(RuntimeError):
    """Workers cannot be built, or none of them lives: exit 1."""


class ClusterError(RuntimeError):
    """Ray cannot be started or joined: exit 1. Nothing was decoded."""


class StoreError(RuntimeError):
    """The store of the input or of the models does not answer: exit 1. What is done is kept; run again to resume."""


class StalledRunError(RuntimeError):
    """No worker has read or written a token for too long: exit 1. What is done is kept; run again to resume."""


class OutputError(RuntimeError):
    """The output folder takes no more files: exit 1. What was committed before is there; run again to resume."""


class TooManyErrorsError(RuntimeError):
    """Most documents fail, and the run has stopped early: exit 3. What is done is kept."""


class InterruptedRunError(Exception):
    """The run was told to stop; run again to resume: exit 75."""


SAID_IN_ONE_LINE = (
    RefusedError,
    LockHeldError,
    LockGoneError,
    OtherRunError,
    OutputError,
    StoreError,
    ClusterError,
    WorkersFailError,
    StalledRunError,
    TooManyErrorsError,
)
"""What a user can do something about: no traceback."""


def exit_code(error: BaseException) -> int:
    """The exit code of a run that ended with this exception."""
    codes: dict[type[BaseException], int] = {
        RefusedError: EXIT_REFUSED,
        LockHeldError: EXIT_LOCKED,
        OtherRunError: EXIT_OTHER_RUN,
        TooManyErrorsError: EXIT_TOO_MANY_ERRORS,
        InterruptedRunError: EXIT_INTERRUPTED,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), EXIT_FAILED)
