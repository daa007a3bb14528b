"""The check of a GPU: what a start would prove, for the shapes of targets in use, and the tests that need a GPU.

`python3 -m benchmarks.gpu_check --out out/gpu` leaves `NAME.json` for each target and `summary.json`. The exit code is
1 if a kernel that can run here is wrong, or a test fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_pairs import FULL, TINY, PairShape
from specextend.decoding.device import device_name, traits_of
from specextend.decoding.measurements import measure_limits
from specextend.proof.ladder import identity, prove
from specextend.proof.subject import Subject
from specextend.shipped import code_commit

PROOF_S, TESTS_S = 130.0, 125.0
"""Seconds of each target's proof and of the tests; together less than nine minutes."""
_TESTS = ("tests/gpu", "-m", "gpu", "-q", "-rs", "-c", "/dev/null", "--rootdir", ".", "--confcutdir", "tests/gpu")
_WITHOUT = ("--import-mode", "importlib", "-p", "no:cacheprovider")
_SHOWN = 1000
"""Characters of a message that are kept."""


def subjects(device: torch.device, *, tiny: bool) -> Iterator[tuple[str, Subject]]:
    """Yield a subject for each pair's target, in batches of four as long as a GPU of 40 GB holds."""
    for shape in TINY[:1] if tiny else FULL:
        yield shape.name, _subject(shape, device, batch=2 if tiny else 4, longest=600 if tiny else 16896)


def _subject(shape: PairShape, device: torch.device, batch: int, longest: int) -> Subject:
    return Subject(
        device=str(device),
        dtype="bfloat16",
        model={"model_type": "llama", **shape.target},
        num_nodes=shape.tree.most_nodes,
        depth=shape.tree.depth,
        batch=batch,
        longest=longest,
        num_rows=batch * (longest + 512),
        chunk=traits_of(device).prefill_chunk,
    )


def run_tests() -> dict[str, Any]:
    """Run the tests that need a GPU."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", *_TESTS, *_WITHOUT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TESTS_S, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "said": f"not done after {TESTS_S:g} s"}
    said = (done.stdout + done.stderr).strip()[-_SHOWN:]
    return {"ok": done.returncode == 0, "said": said, "seconds": time.monotonic() - begin}


def main() -> int:
    """Prove, test, write what was found, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", choices=("full", "tiny"), default="full")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device, wrong = torch.device(given.device), 0
    summary: dict[str, Any] = {"commit": code_commit(), "device": device_name(device)}
    summary["limits"] = asdict(measure_limits(device, torch.bfloat16))
    for name, subject in subjects(device, tiny=given.shapes == "tiny"):
        proof = prove(subject, limit_s=PROOF_S)
        print(f"{name}:", *(f"{trial}\n    ms: {trial.times()}" for trial in proof.trials), sep="\n  ", flush=True)
        found = {"holds_for": identity(subject), **asdict(proof)}
        (given.out / f"{name.replace(' ', '')}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        wrong += sum(trial.is_wrong for trial in proof.trials)
    summary["tests"] = tests = run_tests() if device.type == "cuda" else {"ok": True, "said": "they need a GPU"}
    print(tests["said"])
    (given.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return int(wrong > 0 or not tests["ok"])


if __name__ == "__main__":
    sys.exit(main())
