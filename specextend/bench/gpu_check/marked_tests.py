"""Stage `tests`: the tests that are marked `gpu`, run by pytest with the settings that need no plugin."""

from __future__ import annotations

import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from specextend.bench.gpu_check.stage import Row, Setting, SkippedError

FOLDER = "tests/gpu"
_SHOWN = 1000
"""Characters of a failure that are kept."""


def run(setting: Setting) -> Iterator[Row]:
    """Yield one row for each test."""
    if find_spec("pytest") is None:
        raise SkippedError("the package pytest is not installed")
    if setting.device == "cpu":
        raise SkippedError("these tests need a GPU")
    with TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", FOLDER, "-m", "gpu", "-q", "--junit-xml", str(report)]
        command += ["-c", "/dev/null", "--rootdir", ".", "--confcutdir", FOLDER, "--import-mode", "importlib"]
        command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
        output, in_time = run_for(command, setting.seconds_left)
        if not report.is_file():
            raise RuntimeError(f"pytest left no report: {output[-_SHOWN:]}")
        yield from read_report(report)
        if not in_time:
            yield {"wrong": "the time was up before all tests had run"}


def run_for(command: Sequence[str], limit_s: float) -> tuple[str, bool]:
    """Run pytest and interrupt it after `limit_s`, when it still reports; return its output, and True if it ended."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return process.communicate(timeout=limit_s)[0], True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.communicate()[0], False


def read_report(report: Path) -> Iterator[Row]:
    """Read the tests of a JUnit report: name, seconds, and what it says of each that did not pass."""
    for case in ET.parse(report).iter("testcase"):
        row: Row = {"test": case.get("name"), "seconds": float(case.get("time", 0))}
        for outcome in case:
            if outcome.tag == "skipped":
                row["skipped"] = outcome.get("message")
            if outcome.tag in ("failure", "error"):
                last = (outcome.text or "").strip().rpartition("\n")[2]
                row["wrong"] = f"{case.get('name')}: {outcome.get('message')} ({last})"[:_SHOWN]
        yield row
