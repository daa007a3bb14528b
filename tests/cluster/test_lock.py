import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest
from pyarrow import fs

from scripts.simulated_store import SimulatedStore
from specextend.cluster import lock
from specextend.cluster.exits import InterruptedRunError, RunError
from specextend.cluster.lock import LockHolder, OutputLock, held, read_lock
from specextend.data.storage import Location, resolve, write_bytes


@pytest.fixture
def output(tmp_path):
    return resolve(str(tmp_path))


class Time:
    """A wall clock and a steady one, of a machine whose process may be suspended."""

    def __init__(self):
        self.wall = 1_000_000.0
        self.steady = 0.0

    def pass_by(self, seconds):
        self.wall += seconds
        self.steady += seconds

    def lock(self, output, run_id="00000001"):
        return OutputLock(output, run_id, lambda: self.wall, lambda: self.steady, host=f"host-of-{run_id}")


@pytest.fixture
def now():
    return Time()


def write_lock(output, data):
    write_bytes(output.child("_run", "lock"), data)


def write_holder(output, holder):
    write_lock(output, json.dumps(asdict(holder)).encode())


def elsewhere(heartbeat):
    return LockHolder("feedbeef", "another-host", 1, heartbeat)


def test_who_waits_for_a_lock_says_so_once_and_can_be_told_to_stop(output, monkeypatch):
    """A minute of silence looks like a hang; and a scheduler may give up on it."""
    write_holder(output, elsewhere(time.time()))
    said = []
    looks = iter(range(3))

    def checkpoint():
        if next(looks, None) is None:
            raise InterruptedRunError("SIGTERM received")

    monkeypatch.setattr(lock, "CHECK_EVERY_S", 0.01)
    start = OutputLock(output, "00000001")
    with pytest.raises(InterruptedRunError), held(start, said.append, checkpoint):
        pass
    assert len(said) == 1
    assert "is held by run feedbeef" in said[0]


def test_a_pid_of_another_container_says_nothing(output):
    """Two containers may share a host name and a folder; a pid missing here may be alive there."""
    process = subprocess.Popen("true")
    process.wait()
    write_holder(output, LockHolder("feedbeef", socket.gethostname(), process.pid, time.time(), "another boot/pid:[1]"))
    assert not OutputLock(output, "00000001").try_take()


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe", b'{"run_id": 1, "host": 2}'])
def test_a_file_that_is_no_lock_is_named_watched_and_taken_over_unless_it_changes(output, now, junk):
    """Another version's driver may hold the folder by it; what nobody changes must not block it for ever."""
    write_lock(output, junk)
    start = now.lock(output)
    other = now.lock(output)
    assert not start.try_take()
    assert not other.try_take()
    assert "this version cannot read its _run/lock); waiting up to 60 s" in start.watched
    now.pass_by(lock.STALE_S)
    assert start.try_take()
    assert read_lock(output).run_id == "00000001"
    write_lock(output, b"beat 2")
    with pytest.raises(RunError, match="this version cannot read its _run/lock"):
        other.try_take()


def test_a_lock_that_a_slow_store_still_takes_is_removed_with_its_driver(tmp_path):
    """Of two drivers that raced the one that had lost left its lock there: its last heartbeat landed after its end."""
    begins, may_end = threading.Event(), threading.Event()

    class SlowStore(SimulatedStore):
        def open_output_stream(self, path, metadata):
            if threading.current_thread() is heartbeat:
                begins.set()
                may_end.wait()
            return super().open_output_stream(path, metadata)

    store = Location(fs.PyFileSystem(SlowStore(0)), str(tmp_path))
    held = OutputLock(store, "00000001")
    heartbeat = threading.Thread(target=held.beat)
    held.try_take()
    heartbeat.start()
    begins.wait()
    held.release()
    may_end.set()
    heartbeat.join()
    held.beat()
    assert read_lock(store) is None


def test_a_driver_that_stands_still_while_it_writes_its_lock_blocks_nobody_in_silence(output, now, monkeypatch):
    """Suspended inside a heartbeat it kept its successor waiting in `flock` for 23 minutes, without a word."""
    monkeypatch.setattr(lock, "BUSY_S", 0.05)
    write_holder(output, elsewhere(now.wall))
    handle = os.open(output.child("_run").path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    waiting = now.lock(output)
    assert not waiting.try_take()
    assert f"is held by {elsewhere(0)}; waiting up to 60 s" in waiting.watched
    with pytest.raises(OSError, match="does not go on"):
        waiting.beat()
    now.pass_by(61)
    with pytest.raises(RunError, match="which is suspended: end it"):
        waiting.try_take()
    os.close(handle)
    assert waiting.try_take()


RACER = """
import sys
from specextend.cluster import lock
from specextend.cluster.lock import OutputLock, held
from specextend.cluster.exits import RunError
from specextend.data.storage import resolve
lock.STALE_S, lock.HEARTBEAT_S, lock.CHECK_EVERY_S = 1.0, 0.05, 0.05

def watch(line):
    print("watching", flush=True)
    sys.stdin.readline()

try:
    with held(OutputLock(resolve(sys.argv[1]), sys.argv[2]), say=watch):
        print("won", flush=True)
        sys.stdin.readline()
except RunError:
    print("lost", flush=True)
"""


def racer(output, number):
    command = [sys.executable, "-c", RACER, output.path, f"{number:08x}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_of_many_that_find_a_stale_lock_one_takes_it(output):
    """Retries of a cluster job start together after an outage. All of them have seen the lock before one may take it:
    who came later would watch the winner's.
    """
    write_holder(output, elsewhere(0))
    racers = [racer(output, number) for number in range(4)]
    assert [each.stdout.readline() for each in racers] == ["watching\n"] * 4
    for each in racers:
        each.stdin.write("go\n")
        each.stdin.flush()
    outcomes = [each.stdout.readline().strip() for each in racers]
    for each in racers:
        each.communicate("done\n")
    assert sorted(outcomes) == ["lost", "lost", "lost", "won"]
