"""Runs the stages one after the other; none of them can end the others, and each has its time limit."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specextend.bench.gpu_check.stage import Row, Shapes, write_json

LOGGER = logging.getLogger(__name__)
_SHOWN = 2000
"""Characters of a stage's output that its reason may quote."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the check."""

    name: str
    """Also the name of its JSON file."""
    source: str
    """`module:function`, imported in the stage's own process."""
    limit_s: float
    """Seconds after which it is ended."""


def run_stages(stages: Sequence[Stage], device: str, shapes: Shapes, out: Path) -> Row:
    """Run all stages, and return how each ended: `ok`, `failed` or `skipped`, with the reason and the seconds."""
    ended: dict[str, Row] = {}
    for stage in stages:
        begin = time.monotonic()
        ending = _run(stage, device, shapes, out)
        ended[stage.name] = {**ending, "seconds": round(time.monotonic() - begin, 1)}
        LOGGER.info("%s: %s %s", stage.name, ending["status"], ending["reason"])
    return ended


def _run(stage: Stage, device: str, shapes: Shapes, out: Path) -> Row:
    """Run one stage; if it did not end by itself, complete its file, which keeps the rows so far."""
    path = out / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "specextend.bench.gpu_check.stage_process", stage.name, stage.source]
    command += ["--device", device, "--shapes", shapes, "--out", str(out), "--limit-s", str(stage.limit_s)]
    failure = _wait(command, stage.limit_s)
    kept: Row = {"stage": stage.name, "status": "running", "reason": "", "rows": []}
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["status"] == "running":
        kept |= {"status": "failed", "reason": failure or "it ended before its rows were complete"}
        write_json(path, kept)
    num_skipped = sum("skipped" in row for row in kept["rows"])
    return {
        "status": kept["status"],
        "reason": kept["reason"],
        "rows": len(kept["rows"]),
        "skipped_rows": num_skipped,
    }


def _wait(command: Sequence[str], limit_s: float) -> str:
    """Run a command with all that it starts; return what went wrong, or an empty text."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"it exceeded its limit of {limit_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return f"it ended with code {process.returncode}: {output.strip()[-_SHOWN:]}" if process.returncode else ""
