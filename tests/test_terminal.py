"""Standard streams of the jobs: any text, any encoding, and a reader that goes away."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from tests.job.conftest import in_process, specextend

ROOT = Path(__file__).parent.parent
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202ex\u2028y\rz é"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of a hostile id and message, and figures that name a hostile device."""
    folder = tmp_path_factory.mktemp("streams")
    failed = {"error_class": "NullText", "message": HOSTILE, "stage": "read", "retryable": False, "attempts": 1}
    CommitWriter(resolve(str(folder / "out")), "00000001").commit([{"file": 0, "row": 0, "doc_id": HOSTILE, **failed}])
    result = json.loads((ROOT / "benchmarks/results/ablation-smollm2-epyc.json").read_text()) | {"device": HOSTILE}
    (folder / "figures.json").write_text(json.dumps(result))
    return folder


COMMANDS = {
    "report": ["report", "out"],
    "bench": ["bench.py", "figures.json"],
    "refused": ["summarize.py", "--config", f"no{HOSTILE}"],
    "summarize": ["summarize.py", "--help"],
    "prepare": ["prepare", "documents", f"no{HOSTILE}", "--output", "a.parquet"],
    "train": ["train", "--config", f"no{HOSTILE}", "--text", "a", "--output", "b"],
    "arguments": ["report", "out", HOSTILE],
}
CODES = {"refused": 2, "prepare": 2, "train": 2, "arguments": 2}


def command(name):
    """The whole command line of a command, or of a script of `jobs/`."""
    first, *arguments = COMMANDS[name]
    started = [str(ROOT / "jobs" / first)] if first.endswith(".py") else ["-m", "specextend", first]
    return [sys.executable, *started, *arguments]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_job_lets_a_text_drive_the_terminal(name, folder, monkeypatch):
    """Ids, messages, file names and arguments come from elsewhere."""
    monkeypatch.chdir(folder)
    first, *arguments = COMMANDS[name]
    run = in_process if first.endswith(".py") else specextend
    ended = run(first, *arguments)
    shown = ended.stdout + ended.stderr
    assert ended.code == CODES.get(name, 0), shown
    assert shown
    assert "Traceback" not in shown
    assert not set(shown) & set("\x1b\x07\r\u202e\u2028")
    unwrapped = "".join(shown.split()).replace("\\\\", "\\")  # tables break long cells, Markdown doubles backslashes
    assert name in ("summarize", "train") or r"\x1b]0;owned\x07\x1b[2J\u202ex\u2028y\rz" in unwrapped


@pytest.mark.parametrize("name", ["report", "summarize"])
def test_a_reader_that_goes_away_ends_no_job(name, folder):
    """`specextend report out | head -1`: the rest is not read, and nobody wants a traceback instead."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": writer, "stderr": subprocess.PIPE}
    ended = subprocess.run(command(name), cwd=folder, env=environment, check=False, **pipes)
    os.close(writer)
    assert ended.returncode == 0
    assert ended.stderr == b""


def test_closed_streams_end_no_job(folder):
    """`>&- 2>&-`, as some daemons start their children: Python has no such streams then."""
    line = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command("report")]
    ended = subprocess.run(line, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert ended.returncode == 0


def test_a_traceback_is_plain_too(folder):
    """The one message that nobody foresaw is the likeliest to quote what was read."""
    code = "from specextend.terminal import guard_streams; guard_streams(); raise RuntimeError('\\x1b[2J\\u202e')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert ended.stderr.splitlines()[-1] == rb"RuntimeError: \x1b[2J\u202e"
