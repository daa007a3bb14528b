"""The lock of an output folder, `_run/lock`, which keeps out other drivers on any machine.

Start with `held`.
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
"""Seconds without a heartbeat until any driver may take over."""
DOUBT_S = 45.0
"""Seconds without a heartbeat until a driver confirms its lock before it writes."""
SETTLE_S = 2.0
"""Seconds until a write race is decided, where files cannot be locked: the last writer wins."""
CHECK_EVERY_S = 1.0
"""Seconds between looks at the lock of a possibly dead driver."""
UNKNOWN = "an unknown driver (this version cannot read its _run/lock)"
_RELEASES = 3
BUSY_S = 2.0
_EVERY_S = 0.01
LAST_S = 10.0


@dataclass(frozen=True)
class LockHolder:
    """The driver that holds an output folder."""

    run_id: str
    host: str
    pid: int
    heartbeat: float
    """Seconds since the epoch, by the holder's clock."""
    pid_namespace: str = ""
    """Boot and process namespace of the pid."""

    def is_gone(self, host: str) -> bool:
        """Return True if the holder ran on `host`, this machine, and has ended."""
        here = _pid_namespace()
        if not here or (self.host, self.pid_namespace) != (host, here):
            return False
        return self.pid == os.getpid() or not os.path.exists(f"/proc/{self.pid}")

    def seems_alive(self, now: float) -> bool:
        """Guess, by comparing the clocks of two machines."""
        return abs(now - self.heartbeat) <= STALE_S and not self.is_gone(socket.gethostname())

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


def read_lock(output: Location) -> LockHolder | None:
    """Return the holder in `_run/lock`, alive or dead; None without a valid lock."""
    data = _read(output)
    return None if data is None else parse_lock(data)


def _read(output: Location) -> bytes | None:
    """Read the lock file, twice if invalid: a store may briefly send garbage."""
    data = read_bytes(lock_file(output))
    return data if data is None or parse_lock(data) else read_bytes(lock_file(output))


def parse_lock(data: bytes) -> LockHolder | None:
    """Parse a lock file; None if it is invalid. Unknown fields are ignored."""
    holder = parse_record(LockHolder, data)
    return holder if holder is not None and math.isfinite(holder.heartbeat) else None


class OutputLock:
    """The lock of an output folder. Use it through `held`.

    A holder counts as dead if its process has ended, or if its lock has not changed for `STALE_S`
    by the local clock. Clocks of two machines are never compared.
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
        self._since = 0.0
        """Time of the last change of the watched or the written lock."""
        self._is_settling = False
        self._mutex = threading.Lock()
        self._written = 0.0
        self._beat_at = (monotonic(), clock())
        self._lost: RunError | None = None
        self._released = threading.Event()
        self.predecessor: LockHolder | None = None

    @property
    def watched(self) -> str:
        """Lock that `try_take` waits for; empty without a wait."""
        if self._seen is None:
            return ""
        holder = parse_lock(self._seen) or UNKNOWN
        return (
            f"{self.output.path} is held by {holder}; waiting up to {STALE_S:.0f} s for a sign "
            "of life"
        )

    def try_take(self) -> bool:
        """Try to take the lock; return True on success.

        Raises:
            RunError: Another driver holds the folder.
            OSError: The store does not answer.
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
                    f"{self.output.path} is held by {holder}, which is suspended: end it",
                    EXIT_LOCKED,
                )
            self.predecessor = None if found is None else parse_lock(found)
            self._write()
        if not is_exclusive:
            self._is_settling, self._since = True, self._monotonic()
        return is_exclusive

    def check(self) -> None:
        """Check that this driver still has the lock.

        The store is asked only if the last heartbeat is old. A suspended driver may continue if the
        folder was not taken meanwhile.

        Raises:
            RunError: The lock was lost.
            OutputError: The store does not answer.
        """
        if self._lost is not None:
            raise self._lost
        steady_s = self._monotonic() - self._beat_at[0]
        wall_s = self._clock() - self._beat_at[1]
        if steady_s > DOUBT_S or not 0 <= wall_s <= DOUBT_S:
            self.confirm()

    def confirm(self) -> None:
        """Ask the store for the holder. Raises as `check`."""
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
        """Renew the lock, or find it lost. Raises OSError."""
        with self._mutex, exclusive(self.output) as is_exclusive:
            if is_exclusive is None:
                raise BlockingIOError("another process examines it and does not go on")
            if self._lost is not None or self._released.is_set():
                return
            if (data := _read(self.output)) is None:
                self._lost = RunError(
                    f"{self.output.path}: _run/lock was removed; run again to resume"
                )
            elif not self._is_ours(holder := parse_lock(data)):
                self._lost = RunError(
                    f"{self.output.path} was taken over by {holder or 'another driver'}",
                    EXIT_LOCKED,
                )
            else:
                self._write()
        if self._released.is_set():  # during the write
            self.release()

    def release(self) -> None:
        """Remove the lock if it is held."""
        self._released.set()
        for _ in range(_RELEASES):
            # a remaining lock goes stale; it must not hide an earlier error
            with suppress(OSError):
                if self._is_ours(read_lock(self.output)):
                    delete(lock_file(self.output))
                return

    def _is_dead(self, found: bytes) -> bool:
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
                f"{self.output.path} was taken by {holder or 'another driver'} at the same moment",
                EXIT_LOCKED,
            )
        return True

    def _is_ours(self, holder: LockHolder | None) -> bool:
        return holder is not None and holder.run_id == self.run_id

    def _write(self) -> None:
        """Write contents that always differ from the last ones."""
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
    """Wait for a lock and hold it, with a heartbeat thread.

    Args:
        say: Receives a message about another driver.

    Raises:
        RunError: Another driver holds the folder.
        OutputError: The store does not answer.
    """
    closing = threading.Event()

    def keep() -> None:
        while not closing.wait(HEARTBEAT_S):
            # `check` asks the store later
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
    """Exclude other processes while the lock is examined and taken.

    Yields False if the file system cannot, and None while another process blocks.
    """
    folder = records_folder(output).path
    if not output.is_local or not os.path.isdir(folder):
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _locked(handle, time.monotonic() + BUSY_S)
    finally:
        os.close(handle)


def _locked(handle: int, until: float) -> bool | None:
    while time.monotonic() < until:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # on some network file systems
            time.sleep(_EVERY_S)
        except OSError:  # some network file systems cannot lock
            return False
    return None


def _pid_namespace() -> str:
    """Return an id that distinguishes containers with equal host names."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
