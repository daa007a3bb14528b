"""What a run tells others at its end: a command and a web address get its exit code and its report as JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from typing import IO, Any, TypeVar

from specextend.cluster.display import Display
from specextend.cluster.exits import EXIT_INTERRUPTED, EXIT_LOCKED, Interrupt, RefusedError
from specextend.cluster.stores import within
from specextend.config import JobOptions, RunConfig
from specextend.core import first_line
from specextend.data.run_folder import report_file
from specextend.data.storage import read_bytes, resolve

HOOK_S = 60.0
"""Seconds that the report may take to be read, the command to end, and the address to answer."""
STOPPED_S = 3.0
"""Seconds that all of this may still take if the run is told to stop meanwhile."""
_LAST_WORDS_BYTES = 400
"""What is quoted of a command that fails: the end of its stderr."""
LAST_WORDS_S = 1.0
"""Seconds to wait for them; a process that a command has left behind may hold its stderr open for ever."""
Value = TypeVar("Value")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def check_hook(job: JobOptions) -> None:
    """Raise RefusedError for a command or a variable that this machine does not have."""
    if job.on_end_command and shutil.which(job.on_end_command[0]) is None:
        raise RefusedError(f"job.on_end_command: there is no command {job.on_end_command[0]}; name one, or its path")
    if "${" in _VARIABLE.sub("", job.on_end_url):
        raise RefusedError("job.on_end_url has a ${ that no name and } follow; write ${NAME}")
    missing = [name for name in _VARIABLE.findall(job.on_end_url) if not os.environ.get(name)]
    if missing:
        raise RefusedError(f"job.on_end_url has ${{{missing[0]}}}, which is not set in the environment; set it")


class _Patience:
    """Waits for what the hook does, but not for long once the run is told to stop, as a machine that goes down does.

    A run that has ended because it was told so (exit 75) has what is left of `job.grace_s`.
    """

    def __init__(self, interrupt: Interrupt, code: int) -> None:
        self._interrupt = interrupt
        self._has_grace = code == EXIT_INTERRUPTED
        self._told_at: float | None = None

    def wait(self, call: Callable[[], Value]) -> Value:
        """Return or raise what `call` does. Raises TimeoutError if it takes too long."""
        return within(HOOK_S, call, self._check)

    def _check(self) -> None:
        if self._has_grace or not self._interrupt.is_told:
            return
        now = time.monotonic()
        self._told_at = self._told_at or now
        if now - self._told_at >= STOPPED_S:
            raise TimeoutError("the run was told to stop")


def tell_end(
    config: RunConfig, display: Display, interrupt: Interrupt, code: int, reason: str | None, *, has_report: bool
) -> None:
    """Tell command and address how a start has ended; say if that fails, which changes nothing else.

    A start that found another driver at work tells nothing. reason: of an end by an exception. has_report: this start
    has written the report.
    """
    job = config.job
    if code == EXIT_LOCKED or not (job.on_end_command or job.on_end_url):
        return
    patience = _Patience(interrupt, code)
    ending: dict[str, Any] = {"exit_code": code, "reason": reason, "output": config.output.path, "report": None}
    try:
        if has_report:
            ending["report"] = patience.wait(lambda: _read_report(config.output.path))
    except (OSError, ValueError) as error:
        display.note(f"warning: job.on_end_*: the report cannot be read ({first_line(error)})", "hook_failed")
    data = (json.dumps(ending) + "\n").encode()
    for key, tell in (("on_end_command", _run_command), ("on_end_url", _post)):
        if getattr(job, key):
            try:
                tell(getattr(job, key), data, patience)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                display.note(f"warning: job.{key} failed: {first_line(error)}", "hook_failed")


def _read_report(output: str) -> Any:
    return json.loads(read_bytes(report_file(resolve(output), "json")) or b"null")


def _run_command(command: tuple[str, ...], data: bytes, patience: _Patience) -> None:
    """Run a command with the ending on its standard input. Raises OSError, SubprocessError.

    It may print without end, and leave processes behind that go on: only the last words of its stderr are kept, and
    nobody waits for those processes. When its time is over, it is killed together with all that it started.
    """
    with tempfile.TemporaryFile() as ending:
        ending.write(data)
        ending.seek(0)
        process = subprocess.Popen(
            command, stdin=ending, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
    last_words: deque[bytes] = deque(maxlen=1)
    reader = threading.Thread(target=_keep_last_words, args=(process.stderr, last_words), daemon=True)
    reader.start()
    try:
        code = patience.wait(process.wait)
    except TimeoutError as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise subprocess.SubprocessError(f"{error}, so it was killed") from None
    if code:
        reader.join(LAST_WORDS_S)
        said = b"".join(last_words).decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise subprocess.SubprocessError(f"exit {code}" + (f", {said}" if said else ""))


def _keep_last_words(stream: IO[bytes] | None, last_words: deque[bytes]) -> None:
    """Read a stream to its end, and keep no more of it than its last words."""
    assert stream is not None
    with stream:
        while piece := os.read(stream.fileno(), 1 << 16):
            last_words.append((b"".join(last_words) + piece)[-_LAST_WORDS_BYTES:])


def _post(url: str, data: bytes, patience: _Patience) -> None:
    patience.wait(lambda: _post_now(url, data))


def _post_now(url: str, data: bytes) -> None:
    """POST the ending to an address, whose variables are replaced here, so that no record holds them."""
    address = _VARIABLE.sub(lambda found: os.environ.get(found[1], ""), url)
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HOOK_S):
            pass
    except urllib.error.HTTPError as error:  # its text would hold no address, and others might
        error.close()
        raise OSError(f"it answered {error.code}") from None
    except (OSError, ValueError) as error:
        raise OSError(f"it cannot be reached ({first_line(getattr(error, 'reason', error))})") from None
