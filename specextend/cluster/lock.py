"""One driver per output folder, across machines: `_run/lock`, kept alive by a heartbeat."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from specextend.cluster.exits import LockHeldError, LockLostError
from specextend.cluster.messages import first_line
from specextend.cluster.output import writing
from specextend.data.storage import Location, delete, read_bytes, write_bytes

HEARTBEAT_S = 10.0
STALE_S = 60.0
"""Seconds without a heartbeat after which anyone may take the lock over."""
SETTLE_S = 2.0
"""Seconds to wait where a file system cannot exclude a second writer; the last one wins and the first one sees it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds an output folder."""

    run_id: str
    host: str
    pid: int
    heartbeat: float
    """Seconds since the epoch."""
    pid_namespace: str = ""
    """What makes the pid mean something: boot and process namespace of the host."""

    def is_alive(self, now: float) -> bool:
        """Whether it beat lately, and its process is not known to be gone."""
        if now - self.heartbeat > STALE_S:
            return False
        if (self.host, self.pid_namespace) != (socket.gethostname(), _pid_namespace()):
            return True
        return self.pid != os.getpid() and _is_running(self.pid)

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


def read_lock(output: Location) -> Holder | None:
    """The holder named by `_run/lock`, alive or not; None where there is no lock, or half of one."""
    data = read_bytes(_lock_file(output))
    if data is None:
        return None
    try:
        fields: dict[str, Any] = json.loads(data)
        return Holder(**fields)
    except (ValueError, TypeError):
        return None


def check_free(output: Location) -> None:
    """Raise LockHeldError where a living driver holds the folder; changes nothing."""
    holder = read_lock(output)
    if holder is not None and holder.is_alive(time.time()):
        raise LockHeldError(f"{output.path} is held by {holder}")


class OutputLock:
    """Holds `_run/lock` from entry to exit of a `with` block. Entering raises LockHeldError, OutputError."""

    def __init__(self, output: Location, run_id: str, clock: Callable[[], float] = time.time) -> None:
        self._output, self._run_id, self._clock = output, run_id, clock
        self._beat_at = 0.0
        self._lost_to: str | None = None
        self._why_silent = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="heartbeat", daemon=True)

    def __enter__(self) -> OutputLock:
        with writing(self._output), _exclusive(self._output) as is_exclusive:
            holder = read_lock(self._output)
            if holder is not None and holder.is_alive(self._clock()):
                raise LockHeldError(f"{self._output.path} is held by {holder}")
            self._write()
        if not is_exclusive:
            time.sleep(SETTLE_S)
            self.beat()
            if self._lost_to is not None:
                raise LockHeldError(f"{self._output.path} was taken by run {self._lost_to} at the same moment")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Remove the lock if it is ours."""
        with suppress(OSError):  # a lock that cannot be removed goes stale, and hides no error that came before
            holder = read_lock(self._output)
            if holder is not None and holder.run_id == self._run_id:
                delete(_lock_file(self._output))

    def check(self) -> None:
        """Raise LockLostError when another driver has taken over, or may have."""
        if self._lost_to is not None:
            raise LockLostError(f"{self._output.path} was taken over by run {self._lost_to}")
        if self._clock() - self._beat_at > STALE_S:
            why = f": {self._why_silent}" if self._why_silent else ""
            raise LockLostError(f"{self._output.path}: no heartbeat could be written for {STALE_S:.0f} s{why}")

    def beat(self) -> None:
        """One heartbeat; finds out whether the lock is still ours. Raises OSError."""
        holder = read_lock(self._output)
        if holder is None:
            self._lost_to = "unknown (the lock is gone)"
        elif holder.run_id != self._run_id:
            self._lost_to = holder.run_id
        else:
            self._write()

    def _keep(self) -> None:
        while self._lost_to is None and not self._closing.wait(HEARTBEAT_S):
            try:
                self.beat()
            except OSError as error:  # `check` says so once the last good beat is too old
                self._why_silent = first_line(error)

    def _write(self) -> None:
        now = self._clock()
        holder = Holder(self._run_id, socket.gethostname(), os.getpid(), now, _pid_namespace())
        write_bytes(_lock_file(self._output), json.dumps(asdict(holder)).encode())
        self._beat_at = now


def _lock_file(output: Location) -> Location:
    return output.child("_run", "lock")


@contextmanager
def _exclusive(output: Location) -> Iterator[bool]:
    """Keep other processes out while a lock is examined and taken; yields False where the file system cannot."""
    if not output.is_local:
        yield False
        return
    folder = output.child("_run").path
    os.makedirs(folder, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _flock(handle)
    finally:
        os.close(handle)


def _flock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:  # some network file systems refuse it on folders
        return False
    return True


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _pid_namespace() -> str:
    """Tells two containers of one name apart; empty where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
