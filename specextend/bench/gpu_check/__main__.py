"""The check of a GPU: `python3 -m specextend.bench.gpu_check --device cuda --out out/gpu`.

Each stage leaves its rows in `<stage>.json` under the output folder; `summary.json` says how each ended, and of which
code. The exit code is 1 if a stage failed, or if none ran to its end.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

from specextend.bench.gpu_check.replayed_speed import replay_documents
from specextend.bench.gpu_check.stage import write_json
from specextend.bench.gpu_check.supervisor import Stage, run_stages
from specextend.versions import code_commit, code_sha256

_PACKAGE = "specextend.bench.gpu_check"
STAGES = (
    Stage("machine", f"{_PACKAGE}.machine_facts:run", 34),
    Stage("kernels", f"{_PACKAGE}.kernel_parity:run", 90),
    Stage("tests", f"{_PACKAGE}.marked_tests:run", 125),
    Stage("tokens", f"{_PACKAGE}.same_tokens:run", 72),
    Stage("steps", f"{_PACKAGE}.step_times:run", 132),
    Stage("prefill", f"{_PACKAGE}.prefill_rates:run", 45),
    Stage("synchronisations", f"{_PACKAGE}.synchronisations:run", 40),
)
"""All stages; their limits add up to less than nine minutes."""
CPU_SLACK = 10
"""Factor of the limits for a trial on a CPU, which may be slow and busy, and costs nothing."""


def main() -> int:
    """Run all stages, write the summary, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", choices=("full", "tiny"), default="full")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    code = {"commit": code_commit(), "code_sha256": code_sha256()}
    summary = {"kind": "gpu-check", **code, "device": given.device, "shapes": given.shapes}
    slack = CPU_SLACK if given.device == "cpu" else 1
    stages = [replace(stage, limit_s=slack * stage.limit_s) for stage in STAGES]
    ended = run_stages(stages, given.device, given.shapes, given.out)
    ended["replay"] = replay_documents(given.out)
    write_json(given.out / "summary.json", {**summary, "seconds": time.monotonic() - begin, "stages": ended})
    statuses = {stage["status"] for stage in ended.values()}
    return int("failed" in statuses or "ok" not in statuses)


if __name__ == "__main__":
    sys.exit(main())
