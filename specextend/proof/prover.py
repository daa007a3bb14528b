"""The proof of a node's kernels: separate processes prove the candidates until each has a verdict.

So a crash or a hang costs only its kernel. A node proves once, under a lock, and keeps verdicts
until a driver, library, compiler, shape or our code changes.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock

from specextend.attention.backends import Trial
from specextend.core import ReadOnly, Values
from specextend.decoding.device import device_name, toolchain_versions
from specextend.decoding.measurements import keep, read_kept
from specextend.folders import cache_folder, package_version, temporary_folder
from specextend.proof.subject import Candidate, Kernels, Subject

LIMIT_S = 120.0
"""Seconds without a new verdict before a process is ended; compiling takes most of them."""
_PACKAGES = ("torch", "torchao", "triton", "flash-attn", "transformers")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proof:
    """The kernels taken, and the verdict on each candidate."""

    kernels: Kernels
    trials: tuple[Trial, ...] = ()


def load_proof(subject: Subject, candidates: Sequence[Candidate], *, timed: bool = False) -> Proof:
    """Load or prove the verdicts on candidates, and log a line for each.

    Verdicts that are not final are sought again at each start, except by workers that waited for
    the same try.
    """
    asked_at = time.time()
    key = identity(subject) | {"candidates": [asdict(each) for each in candidates]}
    with ExitStack() as stack:
        # the folder is not writable, or has no locks
        with suppress(OSError, NotImplementedError):
            if (folder := cache_folder()) is not None:
                stack.enter_context(FileLock(folder / "proof.lock"))
        kept = read_kept("proof", key) or {"at": 0.0, "trials": []}
        known = [Trial(**each) for each in kept["trials"]]
        if kept["at"] < asked_at:
            known = known[: next((i for i, each in enumerate(known) if not each.is_final), None)]
        trials = prove(subject, candidates, known)
        if len(known) < len(trials):
            keep("proof", key, {"at": time.time(), "trials": [asdict(each) for each in trials]})
    for each in trials:
        _log.log(logging.INFO if each.taken or each.is_final else logging.WARNING, "%s", each)
    return Proof(chosen(candidates, trials), tuple(trials))


def identity(subject: Subject) -> Values:
    """Return the conditions for which a proof holds, as JSON values."""
    return {
        "device": device_name(torch.device(subject.device)),
        "cuda": torch.version.cuda,
        "versions": {name: package_version(name) for name in _PACKAGES} | toolchain_versions(),
        "subject": asdict(subject),
    }


def chosen(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> Kernels:
    """Return torch's kernels, replaced by the candidates taken so far."""
    kernels = Kernels()
    for candidate, trial in zip(candidates, trials, strict=False):
        if trial.taken:
            kernels = candidate.among(kernels)
    return kernels


def prove(
    subject: Subject,
    candidates: Sequence[Candidate],
    known: Sequence[Trial] = (),
) -> list[Trial]:
    """Return the verdict on each candidate; the first ones are `known`."""
    trials = [*known]
    while len(trials) < len(candidates):
        task = {
            "subject": asdict(subject),
            "kernels": asdict(chosen(candidates, trials)),
            "candidates": [asdict(each) for each in candidates[len(trials) :]],
        }
        trials += run_apart(task)
    return trials


def run_apart(task: ReadOnly) -> list[Trial]:
    """Run a task in a separate process; return its verdicts.

    A candidate at which it died or hung gets a verdict too.
    """
    with temporary_folder() as folder:
        out = Path(folder, "verdicts.jsonl")
        out.touch()
        with Path(folder, "said.txt").open("w+", encoding="utf-8", errors="replace") as said:
            child = subprocess.Popen(
                [sys.executable, "-m", "specextend.proof.child", str(out)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                text=True,
                env=os.environ | {"TMPDIR": folder},
                start_new_session=True,  # so that its children, such as compilers, end with it
            )
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps(task))
            is_late = _wait(child, out)
            said.seek(0)
            why = (said.read().strip().splitlines() or ["it said nothing"])[-1]
        trials = [Trial(**json.loads(line)) for line in out.read_text().splitlines()]
    code = child.returncode
    if len(trials) == len(task["candidates"]) or (trials and code == 0):
        return trials
    is_wrong = False
    if is_late:
        why = f"nothing came of it for {LIMIT_S:.0f} s"
    elif code < 0:  # SIGKILL is what the kernel sends where memory runs out
        why = f"it ended by {signal.Signals(-code).name}"
        is_wrong = -code != signal.SIGKILL
    why = why if is_wrong else f"not there yet: {why}"
    name = task["candidates"][len(trials)]["name"]
    trials.append(Trial(name=name, taken=False, why=why, is_wrong=is_wrong, is_final=is_wrong))
    return trials


def _wait(child: subprocess.Popen[str], out: Path) -> bool:
    """Wait for a process and end its process group; return True if it hung."""
    size = -1
    try:
        while True:
            try:
                child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                if out.stat().st_size == size:
                    return True
                size = out.stat().st_size
            else:
                return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
