"""The job as its users start it: a process with arguments, an exit code, and an output folder."""

import io
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cli import run as commands
from specextend.config import RunConfig

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tiny-random.yaml"
TEXT = "The committee met and talked about the weather. "
AT_ONCE_S = 0.01
"""Seconds that a row waits for its commit where each is to have one of its own."""
LONGEST_S = 600
"""Far more than anything takes, also on a slow machine with much else to do."""
DYING_DRIVER = f"{ROOT}/tests/faults/dying_driver.py"


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    stdout: str
    stderr: str

    def exits(self, code):
        """The same, which must have ended with that code."""
        assert self.code == code, self.stdout + self.stderr
        return self

    def line(self, code=2):
        """The one line that it ended with."""
        [line] = self.exits(code).stderr.splitlines()
        return line


def text_of(path):
    """A text file of the project."""
    return (ROOT / path).read_text()


def command(*arguments):
    return [sys.executable, f"{ROOT}/jobs/summarize.py", *arguments]


def dying_command(death, part, *arguments):
    """The job, to which `dying_driver.py` does something once so many parts are there."""
    return [sys.executable, DYING_DRIVER, death, "after", "*/_run/parts/part-*", str(part), *arguments]


def pausing_command(*arguments):
    """The job, which suspends itself once its first part is there: what is done to it then never comes too late."""
    return dying_command("SIGSTOP", 1, *arguments)


def is_paused(pid):
    """Whether a process has suspended itself."""
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def wait_for_pause(process):
    """Wait until the job has suspended itself; SIGCONT lets it go on."""
    wait_for(lambda: process.poll() is not None or is_paused(process.pid), "pause")
    assert process.poll() is None, process.communicate()


def end_of(process, code=0):
    """What a process has said, once it has ended with a code."""
    said = "".join(filter(None, process.communicate(timeout=LONGEST_S)))
    assert process.returncode == code, said
    return said


def submitted(words):
    """The configuration that a command line is for a job on a cluster."""
    given = commands.Arguments(**commands.run.make_context("summarize.py", words).params)
    return RunConfig.load(given.config, given.overrides, allow_relative=False, run_date=given.run_date)


def environment():
    """That of the tests; the package is found whether it is installed or not."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def ran(*command, cwd=ROOT, env=None):
    """Run a program to its end."""
    pipes = {"capture_output": True, "text": True, "timeout": LONGEST_S, "check": False}
    process = subprocess.run(command, cwd=cwd, env=env or environment(), **pipes)
    return Ended(process.returncode, process.stdout, process.stderr)


def summarize(*arguments):
    """Run the job to its end."""
    return ran(*command("--config", CONFIG, *arguments))


@pytest.fixture
def start():
    """Start the job and go on; what is left of it is ended after the test."""
    processes = []

    def start(*arguments, command=command):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command("--config", CONFIG, *arguments), env=environment(), cwd=ROOT, **pipes)
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        process.communicate(timeout=LONGEST_S)


@contextmanager
def kept_handlers():
    """Give the signals that a run takes over back at the end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def in_process(script, *arguments):
    """Run a script of `jobs/` in this process, to which torch and Ray are known already, as if it were the main one."""
    return _as_main(runpy.run_path, f"{ROOT}/jobs/{script}", *arguments)


def specextend(line, *arguments):
    """Run the command `specextend` in this process, as it is typed; `arguments` are words as they are."""
    return _as_main(runpy.run_module, "specextend", *shlex.split(line), *arguments)


def _as_main(run, *argv):
    def leave(code):
        raise SystemExit(code)

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, kept_handlers():
        patch.setattr(sys, "argv", [*map(str, argv)])
        patch.setattr(os, "_exit", leave)
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]), pytest.raises(SystemExit) as ended:
            run(argv[0], run_name="__main__")
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in streams)
    return Ended(ended.value.code or 0, stdout, stderr)


@pytest.fixture
def call(monkeypatch):
    """Call the job with arguments. It must not get as far as to start a Ray."""
    monkeypatch.setattr("ray.init", None)
    return partial(in_process, "summarize.py")


@pytest.fixture
def plan(monkeypatch):
    """Plan a run with arguments."""
    monkeypatch.setattr("ray.init", None)
    return partial(specextend, "plan")


def listening(process):
    """Addresses that a process and its descendants listen on."""
    found = []
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it may have ended
            found += each.net_connections("inet")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def wait_for(condition, what):
    """Poll a folder or a process table until it shows something."""
    give_up_at = time.monotonic() + LONGEST_S
    while time.monotonic() < give_up_at:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {LONGEST_S} s")


def write_corpus(path, texts, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, "string"), **columns}), path, row_group_size=4)
    return path


def sets(*settings):
    """Arguments that set keys: `sets("job.workers=2")`."""
    return [part for each in settings for part in ("--set", each)]


def on(corpus, output, *settings):
    """Arguments of a run over a corpus, with settings of its own."""
    return ["--input", corpus, "--output", output, *sets(*settings)]


def long_texts(num_documents=40):
    return [f"{number} {TEXT}" * 40 for number in range(num_documents)]


def long_corpus(folder, num_documents=40):
    """Arguments of a run that takes a while, and commits each row at once."""
    corpus = write_corpus(folder / "in.parquet", long_texts(num_documents))
    arguments = ["--input", corpus, "--set", "input.id_column=null", "--set", "decoding.max_new_tokens=64"]
    return [*arguments, "--set", f"job.commit_every_s={AT_ONCE_S}"]


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def rows(folder):
    """Rows of all files of a folder, in order."""
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def parts(output):
    return sorted((output / "_run" / "parts").glob("*.parquet"))
