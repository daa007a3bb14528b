from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specextend.cluster import lock
from specextend.cluster.exits import LockHeldError, LockLostError
from specextend.cluster.lock import Holder, OutputLock, check_free, read_lock
from specextend.data.storage import Location, delete, resolve


@pytest.fixture
def output(tmp_path: Path) -> Location:
    return resolve(str(tmp_path))


def write_holder(output: Location, holder: Holder) -> None:
    path = Path(output.path, "_run", "lock")
    path.parent.mkdir(exist_ok=True)
    fields = {name: getattr(holder, name) for name in ("run_id", "host", "pid", "heartbeat", "pid_namespace")}
    path.write_text(json.dumps(fields))


def elsewhere(heartbeat: float) -> Holder:
    return Holder("feedbeef", "another-host", 1, heartbeat)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_second_driver_is_refused_and_told_who_holds_the_folder(output: Location):
    """Two writers would each finalize half of the other's work."""
    write_holder(output, elsewhere(time.time()))
    with (
        pytest.raises(LockHeldError, match=r"run feedbeef \(process 1 on another-host\)"),
        OutputLock(output, "00000001"),
    ):
        pass
    with pytest.raises(LockHeldError):
        check_free(output)
    assert read_lock(output) is not None, "the refused driver must not remove the other's lock"


def test_the_lock_names_its_holder_and_goes_with_it(output: Location):
    """`--status` on any machine reads it."""
    with OutputLock(output, "00000001"):
        holder = read_lock(output)
        assert holder is not None
        assert (holder.run_id, holder.host, holder.pid) == ("00000001", socket.gethostname(), os.getpid())
        assert time.time() - holder.heartbeat < 10
    assert read_lock(output) is None


def test_a_lock_without_a_heartbeat_for_a_minute_is_taken_over(output: Location):
    """A driver on a host that died cannot release its lock."""
    write_holder(output, elsewhere(time.time() - 61))
    with OutputLock(output, "00000001"):
        assert read_lock(output).run_id == "00000001"


def test_a_lock_of_this_host_whose_process_is_gone_is_taken_over_at_once(output: Location):
    """After kill -9 the next start must not wait a minute."""
    with OutputLock(output, "00000001"):
        mine = read_lock(output)
    write_holder(output, replace(mine, run_id="feedbeef", pid=dead_pid()))
    with OutputLock(output, "00000002"):
        assert read_lock(output).run_id == "00000002"


def test_a_pid_of_another_container_says_nothing(output: Location):
    """Two containers may share a host name and a folder; a pid missing here may be alive there."""
    holder = Holder("feedbeef", socket.gethostname(), dead_pid(), time.time(), "another boot/pid:[1]")
    write_holder(output, holder)
    with pytest.raises(LockHeldError), OutputLock(output, "00000001"):
        pass


def test_a_driver_that_slept_too_long_learns_that_it_lost_the_lock(output: Location):
    """A suspended driver wakes up and must not commit beside its successor."""
    with OutputLock(output, "00000001") as held:
        held.check()
        write_holder(output, elsewhere(time.time()))
        held.beat()
        with pytest.raises(LockLostError, match="feedbeef"):
            held.check()
    assert read_lock(output).run_id == "feedbeef", "nor remove its successor's lock"


def test_a_driver_whose_lock_is_gone_does_not_take_it_again(output: Location):
    """Its successor may have finished while it slept: `_SUCCESS` stands, and nothing may change any more."""
    with OutputLock(output, "00000001") as held:
        delete(output.child("_run", "lock"))
        held.beat()
        with pytest.raises(LockLostError, match="the lock is gone"):
            held.check()
    assert read_lock(output) is None


def test_a_driver_that_cannot_write_its_heartbeat_stops_before_others_may_start(output: Location):
    """Its lock is stale to everybody else by then."""
    now = [1000.0]
    with OutputLock(output, "00000001", clock=lambda: now[0]) as held:
        now[0] += lock.STALE_S + 1
        with pytest.raises(LockLostError, match="no heartbeat"):
            held.check()


def test_a_driver_says_why_its_heartbeat_could_not_be_written(output: Location, monkeypatch):
    """The disk was full for a minute: without the reason somebody would look for a second driver."""
    now, calls, second = [1000.0], [], threading.Event()

    def full(location: Location, data: bytes) -> None:
        calls.append(location)
        if len(calls) == 2:  # by then the first failure was noted
            second.set()
        raise OSError("No space left on device")

    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    with OutputLock(output, "00000001", clock=lambda: now[0]) as held:
        monkeypatch.setattr(lock, "write_bytes", full)
        assert second.wait(60)
        now[0] += lock.STALE_S + 1
        with pytest.raises(LockLostError, match=r"no heartbeat could be written for 60 s: No space left on device$"):
            held.check()


def test_half_a_lock_file_is_no_lock(output: Location):
    """A file system that filled up while the lock was written must not block the folder for ever."""
    path = Path(output.path, "_run", "lock")
    path.parent.mkdir()
    path.write_text('{"run_id": "fee')
    with OutputLock(output, "00000001"):
        assert read_lock(output).run_id == "00000001"


RACER = """
import sys
from specextend.cluster.lock import OutputLock
from specextend.cluster.exits import LockHeldError
from specextend.data.storage import resolve
sys.stdin.readline()
try:
    with OutputLock(resolve(sys.argv[1]), sys.argv[2]):
        print("won", flush=True)
        sys.stdin.readline()
except LockHeldError:
    print("lost", flush=True)
"""


def test_of_many_that_find_a_stale_lock_one_takes_it(output: Location):
    """Retries of a cluster job start together after an outage."""
    write_holder(output, elsewhere(0))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, output.path, f"{n:08x}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outcomes = [racer.stdout.readline().strip() for racer in racers]
    for racer in racers:
        racer.communicate("done\n")
    assert sorted(outcomes) == ["lost", "lost", "lost", "won"]
