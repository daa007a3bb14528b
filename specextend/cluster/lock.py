"""The lock of an output folder, `_run/lock`: it keeps out other drivers on any machine while its
heartbeat goes on.
"""

import fcntl
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from specextend.cluster.exits import (
    EXIT_LOCKED,
    OutputError,
    RunError,
    writing,
)
from specextend.core import Checkpoint, first_line
from specextend.data.run_folder import lock_file, parse_record, records_folder
from specextend.data.storage import Location, delete, read_bytes, write_bytes

HEARTBEAT_S = 10.0
STALE_S = 60.0
"""Seconds without a change of the lock after which anyone may take it over."""
DOUBT_S = 45.0
"""Seconds without a heartbeat after which a driver checks who holds its folder before it writes
there; nobody can have taken it earlier.
"""
SETTLE_S = 2.0
"""Seconds to wait if the file system cannot exclude a second writer: the last one wins, and the
first one sees it.
"""
CHECK_EVERY_S = 1.0
"""Seconds between two checks of the lock of a driver that may be dead."""
UNKNOWN = "somebody whose _run/lock is no lock that this version knows"
_RELEASES = 3
"""Tries to remove a lock of ours."""
BUSY_S = 2.0
"""Seconds for which a lock is tried that another process examines, which takes it milliseconds."""
_EVERY_S = 0.01
LAST_S = 10.0
"""Seconds that the end of a run waits for a heartbeat that does not return."""


@dataclass(frozen=True)
class LockHolder:
    """The driver that holds an output folder, as the lock names it."""

    run_id: str
    host: str
    pid: int
    heartbeat: float
    """Seconds since the epoch, by the holder's clock."""
    pid_namespace: str = ""
    """Boot and process namespace of the host, without which the pid says nothing."""

    def is_gone(self, host: str) -> bool:
        """Return True if its process ran on `host`, this machine, and is known to have ended."""
        here = _pid_namespace()
        if not here or (self.host, self.pid_namespace) != (host, here):
            return False
        return self.pid == os.getpid() or not os.path.exists(f"/proc/{self.pid}")

    def seems_alive(self, now: float) -> bool:
        """Guess from the lock alone, by two clocks that may differ; to be certain, watch the
        heartbeat.
        """
        return abs(now - self.heartbeat) <= STALE_S and not self.is_gone(socket.gethostname())

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


def read_lock(output: Location) -> LockHolder | None:
    """Read the holder that `_run/lock` names, alive or not; None if there is no lock, or a file
    that is none.
    """
    data = _read(output)
    return None if data is None else parse_lock(data)


def _read(output: Location) -> bytes | None:
    """Read the lock's file; what is no lock is read once more, because a store may send anything
    for a moment.
    """
    data = read_bytes(lock_file(output))
    return data if data is None or parse_lock(data) else read_bytes(lock_file(output))


def parse_lock(data: bytes) -> LockHolder | None:
    """Parse the holder that a lock file names; None for a file that is no lock. Unknown fields are
    ignored.
    """
    holder = parse_record(LockHolder, data)
    return holder if holder is not None and math.isfinite(holder.heartbeat) else None


class OutputLock:
    """The lock of an output folder, `_run/lock`: call `try_take` until it is ours, then `beat` and
    `check`, or `held`.

    A holder counts as dead if its process is known to be gone, or if its lock has not changed for
    STALE_S by our own clock: the clocks of two machines are never compared.

    clock: wall time. monotonic: time that nobody sets. host: this machine.
    """

    def __init__(
        self,
        output: Location,
        run_id: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        host: str = "",
    ):
        self.output, self.run_id, self._host = output, run_id, host or socket.gethostname()
        self._clock = clock
        self._monotonic = monotonic
        self._seen: bytes | None = None
        """The lock of another driver that is watched for a change."""
        self._since = 0.0
        """The time when the watched lock was first seen as it is, or when ours was written."""
        self._is_settling = False
        self._mutex = threading.Lock()
        self._written = 0.0
        self._beat_at = (monotonic(), clock())
        self._lost: RunError | None = None
        self._released = threading.Event()
        self.predecessor: LockHolder | None = None
        """The dead driver whose lock was taken over, if there was one."""

    @property
    def watched(self) -> str:
        """Describe the lock for which `try_take` waits, in one line; empty if it waits for none."""
        if self._seen is None:
            return ""
        holder = parse_lock(self._seen) or UNKNOWN
        return (
            f"{self.output.path} is held by {holder}; waiting up to {STALE_S:.0f} s for a sign "
            "of life"
        )

    def try_take(self) -> bool:
        """Check the lock, and take it if nobody holds it. Returns True once the folder is ours.

        Raises RunError and OSError.
        """
        if self._is_settling:
            return self._settle()
        if self.output.is_local:
            os.makedirs(records_folder(self.output).path, exist_ok=True)
        with exclusive(self.output) as is_exclusive:
            found = _read(self.output)
            if is_exclusive is None:
                found = found or b""
            if found is not None and not self._is_dead(found):
                return False
            if is_exclusive is None:
                holder = parse_lock(found or b"") or UNKNOWN
                raise RunError(
                    f"{self.output.path} is held by {holder}, which stands still: end it",
                    EXIT_LOCKED,
                )
            self.predecessor = None if found is None else parse_lock(found)
            self._write()
        if not is_exclusive:
            self._is_settling, self._since = True, self._monotonic()
        return is_exclusive

    def check(self) -> None:
        """Raise RunError if the folder is not ours, and OutputError if that
        cannot be found out.

        Asks the store only if the last heartbeat was a while ago: a driver that was suspended, or
        whose clock was set, goes on if nobody has taken the folder meanwhile.
        """
        if self._lost is not None:
            raise self._lost
        steady_s = self._monotonic() - self._beat_at[0]
        wall_s = self._clock() - self._beat_at[1]
        if steady_s > DOUBT_S or not 0 <= wall_s <= DOUBT_S:
            self.confirm()

    def confirm(self) -> None:
        """Ask the store who holds the folder. Raises as `check` does."""
        try:
            self.beat()
        except OSError as error:
            why = first_line(error)
            raise OutputError(
                f"{self.output.path}: its lock cannot be confirmed ({why}); run again"
            ) from error
        if self._lost is not None:
            raise self._lost

    def beat(self) -> None:
        """Beat once, and find out whether the lock is still ours. Raises OSError."""
        with self._mutex, exclusive(self.output) as is_exclusive:
            if is_exclusive is None:
                raise BlockingIOError("another process examines it and does not go on")
            if self._lost is not None or self._released.is_set():
                return
            if (data := _read(self.output)) is None:
                self._lost = RunError(
                    f"{self.output.path}: somebody removed _run/lock; run again to resume"
                )
            elif not self._is_ours(holder := parse_lock(data)):
                self._lost = RunError(
                    f"{self.output.path} was taken over by {holder or 'somebody'}", EXIT_LOCKED
                )
            else:
                self._write()
        if self._released.is_set():  # while a slow store took the heartbeat
            self.release()

    def release(self) -> None:
        """Remove the lock if it is ours, and write it no more."""
        self._released.set()
        for _ in range(_RELEASES):
            # a lock that cannot be removed goes stale, and must not hide an earlier error
            with suppress(OSError):
                if self._is_ours(read_lock(self.output)):
                    delete(lock_file(self.output))
                return

    def _is_dead(self, found: bytes) -> bool:
        """Return True if the lock of another driver may be taken over. Raises RunError if that
        driver lives.
        """
        holder = parse_lock(found)
        if holder is not None and holder.is_gone(self._host):
            return True
        if self._seen is not None and found != self._seen:
            raise RunError(f"{self.output.path} is held by {holder or UNKNOWN}", EXIT_LOCKED)
        if self._seen is None:
            self._seen, self._since = found, self._monotonic()
        return self._monotonic() - self._since >= STALE_S

    def _settle(self) -> bool:
        if self._monotonic() - self._since < SETTLE_S:
            return False
        self._is_settling = False
        if not self._is_ours(holder := read_lock(self.output)):
            raise RunError(
                f"{self.output.path} was taken by {holder or 'somebody'} at the same moment",
                EXIT_LOCKED,
            )
        return True

    def _is_ours(self, holder: LockHolder | None) -> bool:
        return holder is not None and holder.run_id == self.run_id

    def _write(self) -> None:
        """Write our lock, so that it differs from the last one whatever the clock says."""
        steady = self._monotonic()
        wall = self._clock()
        self._written = wall if wall != self._written else math.nextafter(self._written, math.inf)
        holder = LockHolder(self.run_id, self._host, os.getpid(), self._written, _pid_namespace())
        write_bytes(lock_file(self.output), json.dumps(asdict(holder)).encode())
        self._beat_at = (steady, wall)


@contextmanager
def held(
    lock: OutputLock,
    say: Callable[[str], object] = lambda line: None,
    checkpoint: Checkpoint = lambda: None,
) -> Iterator[None]:
    """Wait for a lock and hold it for a `with` block, with a heartbeat in a thread of its own.

    say: told whom the lock has to wait for. checkpoint: called while waiting; may raise. Raises
    RunError and OutputError.
    """
    closing = threading.Event()

    def keep() -> None:
        while not closing.wait(HEARTBEAT_S):
            # `check` asks the store itself once the last good beat is too old
            with suppress(OSError):
                lock.beat()

    thread = threading.Thread(target=keep, name="heartbeat", daemon=True)
    try:
        said = ""
        while True:
            with writing(lock.output):
                if lock.try_take():
                    break
            if lock.watched not in ("", said):
                said = lock.watched
                say(said)
            checkpoint()
            time.sleep(CHECK_EVERY_S)
        thread.start()
        yield
    finally:
        closing.set()
        if thread.is_alive():
            thread.join(LAST_S)
        lock.release()


@contextmanager
def exclusive(output: Location) -> Iterator[bool | None]:
    """Keep other processes out while a lock is examined and taken.

    Yields False if the file system cannot, and None if another process stays: one that is suspended
    would for ever.
    """
    folder = records_folder(output).path
    if not output.is_local or not os.path.isdir(folder):
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool | None:
    """Lock a folder for this process; return what `exclusive` yields."""
    until = time.monotonic() + BUSY_S
    while time.monotonic() < until:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # some network file systems say the latter
            time.sleep(_EVERY_S)
        except OSError:  # some network file systems refuse it on folders
            return False
    return None


def _pid_namespace() -> str:
    """Return an id that tells two containers of one name apart; empty if the system has no
    /proc.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
