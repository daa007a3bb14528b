"""Standard streams of the jobs: any text, any encoding, and a reader that goes away."""

import json
import os
import subprocess
import sys

import pytest

from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from tests.job.conftest import ROOT, environment, in_process, ran, specextend

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


@pytest.mark.parametrize(
    "command, code",
    [
        ("report out", 0),
        ("bench.py figures.json", 0),
        ("summarize.py --config HOSTILE", 2),
        ("prepare documents HOSTILE --output a.parquet", 2),
        ("train --config HOSTILE --text a --output b", 2),
        ("report out HOSTILE", 2),
    ],
)
def test_no_job_lets_a_text_drive_the_terminal(command, code, folder, monkeypatch):
    """Ids, messages, file names and arguments come from elsewhere."""
    monkeypatch.chdir(folder)
    first, *arguments = (HOSTILE if word == "HOSTILE" else word for word in command.split())
    run = in_process if first.endswith(".py") else specextend
    ended = run(first, *arguments).exits(code)
    shown = ended.stdout + ended.stderr
    assert shown
    assert "Traceback" not in shown
    assert not set(shown) & set("\x1b\x07\r\u202e\u2028")
    unwrapped = "".join(shown.split()).replace("\\\\", "\\")  # tables break long cells, Markdown doubles backslashes
    assert first == "train" or r"\x1b]0;owned\x07\x1b[2J\u202ex\u2028y\rz" in unwrapped


REPORT = [sys.executable, "-m", "specextend", "report", "out"]
HELP = [sys.executable, str(ROOT / "jobs" / "summarize.py"), "--help"]


@pytest.mark.parametrize("command", [REPORT, HELP])
def test_a_reader_that_goes_away_ends_no_job(command, folder):
    """`specextend report out | head -1`: the rest is not read, and nobody wants a traceback instead."""
    reader, writer = os.pipe()
    os.close(reader)
    pipes = {"stdout": writer, "stderr": subprocess.PIPE}
    ended = subprocess.run(command, cwd=folder, env=environment(), check=False, **pipes)
    os.close(writer)
    assert ended.returncode == 0
    assert ended.stderr == b""


def test_closed_streams_end_no_job(folder):
    """`>&- 2>&-`, as some daemons start their children: Python has no such streams then."""
    line = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *REPORT]
    subprocess.run(line, cwd=folder, env=environment(), check=True)


def test_a_traceback_is_plain_too():
    """The one message that nobody foresaw is the likeliest to quote what was read."""
    code = "from specextend.terminal import guard_streams; guard_streams(); raise RuntimeError('\\x1b[2J\\u202e')"
    assert ran(sys.executable, "-c", code).stderr.splitlines()[-1] == r"RuntimeError: \x1b[2J\u202e"
