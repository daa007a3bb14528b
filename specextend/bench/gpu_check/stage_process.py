"""One stage in a process of its own, so that a fault of the device ends nothing else.

    python3 -m specextend.bench.gpu_check.stage_process NAME MODULE:FUNCTION --device cuda --shapes full --out FOLDER \\
      --limit-s 60
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

from specextend.bench.gpu_check.stage import Run, Setting, run_stage

MARGIN_S = 5.0
"""Seconds at the end of a stage's time limit in which it begins nothing new."""


def main() -> None:
    """Run the stage that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("source")
    parser.add_argument("--device", required=True)
    parser.add_argument("--shapes", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    given = parser.parse_args()
    ends_at = time.monotonic() + given.limit_s - MARGIN_S
    setting = Setting(device=given.device, shapes=given.shapes, out=given.out, ends_at=ends_at)
    run_stage(given.name, lambda: _load(given.source), setting)


def _load(source: str) -> Run:
    """Import the function of `module:function`."""
    module, _, function = source.partition(":")
    run: Run = getattr(import_module(module), function)
    return run


if __name__ == "__main__":
    main()
