"""What a command and an address are told at the end of a start."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from specextend.cluster import end_hook
from specextend.cluster.end_hook import check_hook, tell_end
from specextend.cluster.exits import EXIT_DONE, EXIT_LOCKED, EXIT_REFUSED, Interrupt, RefusedError
from specextend.cluster.run import run
from specextend.config import JobOptions, RunConfig
from tests.cluster.conftest import Screen
from tests.job.conftest import LONGEST_S, wait_for

REPORT = {"rows": {"done": 3}}


@pytest.fixture
def address() -> Iterator[tuple[str, list[Any]]]:
    """A server that keeps what is posted, and answers 500 except to `/good`; at `/late` not before the test's end."""
    posted: list[Any] = []
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.headers["Content-Type"], json.loads(body)))
            if self.path == "/late":
                is_over.wait()
            self.send_response(200 if self.path == "/good" else 500)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    is_over.set()
    server.shutdown()
    server.server_close()


def config_of(folder: Path, **job: Any) -> RunConfig:
    (folder / "report.json").write_text(json.dumps(REPORT))
    return RunConfig.from_values(
        {
            "input": {"path": str(folder / "missing")},
            "output": {"path": str(folder)},
            "target": {"model": "owner/t", "device": "cpu"},
            "decoding": {"mode": "autoregressive"},
            "job": job,
        }
    )


def keeps(path: Path) -> list[str]:
    """A command that copies its standard input to a file."""
    code = "import sys, shutil; shutil.copyfileobj(sys.stdin, open(sys.argv[1], 'w'))"
    return [sys.executable, "-c", code, str(path)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that this one has started, each of which the hook makes the leader of a group."""
    started, popen = [], subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    return started


def members(group: int) -> list[str]:
    """Processes of a group that are alive."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group = (process / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            found += [process.name] * (int(its_group) == group and state != "Z")
    return found


def test_command_and_address_get_code_and_report(
    tmp_path: Path, address: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a chat's hook is a secret, so the configuration, which a run records, holds only a variable."""
    url, posted = address
    monkeypatch.setenv("HOOK", f"{url}/good")
    config, screen = config_of(tmp_path, on_end_command=keeps(tmp_path / "told"), on_end_url="${HOOK}"), Screen()
    tell_end(config, screen, Interrupt(60.0), EXIT_DONE, None, has_report=True)
    ending = {"exit_code": 0, "reason": None, "output": str(tmp_path), "report": REPORT}
    assert json.loads((tmp_path / "told").read_text()) == ending
    assert posted == [("application/json", ending)]
    tell_end(config, screen, Interrupt(60.0), EXIT_LOCKED, "another driver", has_report=False)
    assert len(posted) == 1, "the driver at work will tell"
    assert not screen.notes


def test_a_failure_to_tell_is_said_and_changes_nothing(
    tmp_path: Path, address: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_hook, "LAST_WORDS_S", LONGEST_S)
    url, posted = address
    command = [sys.executable, "-c", "import sys; sys.exit('no mail today')"]
    config, screen = config_of(tmp_path, on_end_command=command, on_end_url=f"{url}/bad"), Screen()
    tell_end(config, screen, Interrupt(60.0), EXIT_DONE, None, has_report=True)
    assert screen.notes == [
        "warning: job.on_end_command failed: exit 1, no mail today",
        "warning: job.on_end_url failed: it answered 500",
    ]
    assert len(posted) == 1


def test_a_command_that_prints_without_end_takes_no_memory_and_is_killed_with_its_children(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it printed was held: `yes` took gigabytes of the driver, and the shell's child printed on."""
    monkeypatch.setattr(end_hook, "HOOK_S", 1.0)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config, screen = config_of(tmp_path, on_end_command=["sh", "-c", "yes >&2; true"]), Screen()
    tell_end(config, screen, Interrupt(60.0), EXIT_DONE, None, has_report=False)
    assert screen.notes == ["warning: job.on_end_command failed: no answer for 1 s, so it was killed"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 64 * 1024  # KiB
    [shell] = started
    wait_for(lambda: not members(shell.pid), "end of the group")


def test_a_stop_while_a_command_runs_ends_it_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that goes down gives half a minute, and the command had a whole one."""
    monkeypatch.setattr(end_hook, "HOOK_S", LONGEST_S)
    monkeypatch.setattr(end_hook, "STOPPED_S", 0.2)
    interrupt, screen, begun = Interrupt(60.0), Screen(), tmp_path / "begun"
    interrupt.disarm()  # as after a run that has ended by itself
    config = config_of(tmp_path, on_end_command=["sh", "-c", f"touch {begun}; sleep 600"])

    def stop() -> None:
        wait_for(begun.exists, "the command")
        interrupt.tell("SIGTERM received")

    stopping = threading.Thread(target=stop)
    stopping.start()
    tell_end(config, screen, interrupt, EXIT_DONE, None, has_report=False)
    stopping.join()
    assert screen.notes == ["warning: job.on_end_command failed: the run was told to stop, so it was killed"]


def test_a_stop_while_an_address_does_not_answer_ends_the_wait(
    tmp_path: Path, address: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_hook, "STOPPED_S", 0.0)
    (url, posted), interrupt, screen = address, Interrupt(60.0), Screen()
    interrupt.disarm()

    def stop() -> None:
        wait_for(lambda: posted, "the request")
        interrupt.tell("SIGTERM received")

    stopping = threading.Thread(target=stop)
    stopping.start()
    tell_end(config_of(tmp_path, on_end_url=f"{url}/late"), screen, interrupt, EXIT_DONE, None, has_report=False)
    stopping.join()
    assert screen.notes == ["warning: job.on_end_url failed: the run was told to stop"]


def test_a_command_that_leaves_a_process_behind_has_ended(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what it sent into the background, and of what it printed the end is quoted.

    It ends once its words were read: how long that takes is up to the machine.
    """
    read = tmp_path / "read"

    class Words(deque[bytes]):
        """What was read of a stream."""

        def append(self, words: bytes) -> None:
            super().append(words)
            if words.endswith(b"no mail\n"):
                read.touch()

    monkeypatch.setattr(end_hook, "deque", Words)
    monkeypatch.setattr(end_hook, "HOOK_S", LONGEST_S)
    script = "sleep 3600 & head -c 3000000 /dev/zero >&2; echo no mail >&2; "
    script += f"until [ -e {read} ]; do sleep 0.1; done; exit 7"
    config, screen = config_of(tmp_path, on_end_command=["sh", "-c", script]), Screen()
    try:
        tell_end(config, screen, Interrupt(60.0), EXIT_DONE, None, has_report=False)
    finally:
        os.killpg(started[0].pid, signal.SIGKILL)
    [note] = screen.notes
    assert note.startswith("warning: job.on_end_command failed: exit 7, ")
    assert note.endswith("no mail")
    assert len(note) < 500


def test_a_run_that_is_refused_tells_why(tmp_path: Path) -> None:
    """Exit 2 is what somebody has to be woken for."""
    config = config_of(tmp_path, on_end_command=keeps(tmp_path / "told"))
    with pytest.raises(RefusedError):
        run(config, Screen(), Interrupt(600.0))
    told = json.loads((tmp_path / "told").read_text())
    assert (told["exit_code"], told["report"]) == (EXIT_REFUSED, None)
    assert "does not exist" in told["reason"]


def test_a_hook_that_cannot_work_is_refused_before_the_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(RefusedError, match="there is no command no-such-command"):
        check_hook(JobOptions(on_end_command=("no-such-command",)))
    with pytest.raises(RefusedError, match=r"has \$\{NO_SUCH\}, which is not set"):
        check_hook(JobOptions(on_end_url="${NO_SUCH}"))
    with pytest.raises(RefusedError, match=r"has a \$\{ that no name and \} follow"):
        check_hook(JobOptions(on_end_url="${HOOK/good"))
    with pytest.raises(ValueError, match="must begin with https"):
        JobOptions(on_end_url="ftp://host")
    with pytest.raises(ValueError, match="must not hold credentials"):
        JobOptions(on_end_url="https://user:password@host/hook")
