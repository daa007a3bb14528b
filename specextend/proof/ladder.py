"""The ladder: rung by rung, kernels that are right and faster take the place of those before them.

Each rung is tried in a process of its own, so that one which crashes, hangs or poisons its GPU
costs itself alone. A node proves once, under a lock, and keeps what came of each rung until the
driver, a library, our code or a shape changes.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock

from specextend.attention.backends import Trial
from specextend.core import ReadOnly, Values
from specextend.decoding.device import device_name
from specextend.decoding.measurements import kept_or_measured
from specextend.folders import cache_folder, temporary_folder
from specextend.proof.subject import Kernels, Subject
from specextend.shipped import package_version

LIMIT_S = 120.0
"""Seconds of a whole proof; rungs that are not tried by then are left out."""
_WIN = 1.05
"""How many times as fast as the one before it a rung must be to be taken."""
_PACKAGES = ("torch", "torchao", "triton", "flash-attn", "transformers")
_DRIVER = Path("/proc/driver/nvidia/version")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A change of kernels, and the forwards by which it is judged."""

    name: str
    changes: ReadOnly
    """Of `Kernels`."""
    judged_by: tuple[str, ...]
    """Of `Times`."""
    needs: str = ""
    """A rung without which this one is nothing."""


TORCH_ALONE = Kernels()
Attempt = Callable[[Kernels, Rung, float], Trial]
"""(kernels, rung, seconds) -> what came of trying the rung on top of the kernels within so many
seconds.
"""
LADDER = (
    Rung(name="flash-attn for prompts", changes={"prompts": "flash"}, judged_by=("prompt",)),
    Rung(name="cuDNN for prompts", changes={"prompts": "cudnn"}, judged_by=("prompt",)),
    Rung(name="Triton for trees", changes={"steps": "triton"}, judged_by=("plain", "tree")),
    Rung(
        name="Triton for layers",
        changes={"layers": "triton"},
        judged_by=("prompt", "plain", "tree"),
    ),
    Rung(
        name="captured steps",
        changes={"graphs": True},
        judged_by=("plain", "tree", "draft"),
        needs="Triton for trees",
    ),
)


@dataclass(frozen=True)
class Proof:
    """The kernels that a proof chose, and all that it tried."""

    kernels: Kernels
    trials: tuple[Trial, ...] = ()


def load_proof(subject: Subject, ladder: Sequence[Rung] = LADDER) -> Proof:
    """Return the kept proof of a subject, or prove it now; log a line for each rung. A node proves
    once at a time.

    A rung that ran out of time or memory is tried again, because something else may have used the
    GPU meanwhile; not by those who waited for that very try. Where no folder can be written,
    nothing is kept.
    """
    asked_at, key = time.time(), identity(subject)

    def is_known(found: ReadOnly) -> bool:
        return not found["trial"]["is_late"] or found["at"] >= asked_at

    def kept(base: Kernels, rung: Rung, limit_s: float) -> Trial:
        about = key | {"base": asdict(base), "rung": asdict(rung)}

        def measure() -> Values:
            return {"trial": asdict(try_apart(subject, base, rung, limit_s)), "at": time.time()}

        return Trial(**kept_or_measured("trial", about, measure, is_known)["trial"])

    with ExitStack() as stack:
        # a folder that cannot be written, or locks nothing
        with suppress(OSError, NotImplementedError):
            if (folder := cache_folder()) is not None:
                stack.enter_context(FileLock(folder / "proof.lock"))
        proof = prove(subject, ladder, attempt=kept)
    for each in proof.trials:
        _log.info("%s", each)
    return proof


def identity(subject: Subject) -> Values:
    """Return what a proof holds for, as JSON values."""
    return {
        "device": device_name(torch.device(subject.device)),
        "driver": _DRIVER.read_text() if _DRIVER.exists() else "",
        "cuda": torch.version.cuda,
        "versions": {name: package_version(name) for name in _PACKAGES},
        "subject": asdict(subject),
    }


def prove(
    subject: Subject,
    ladder: Sequence[Rung] = LADDER,
    limit_s: float = LIMIT_S,
    kernels: Kernels = TORCH_ALONE,
    attempt: Attempt | None = None,
) -> Proof:
    """Try each rung on top of `kernels` and of those rungs that were taken before it; None: in a
    process of its own.
    """
    attempt = attempt or partial(try_apart, subject)
    ends_at = time.monotonic() + limit_s
    tried: list[Trial] = []
    for rung in ladder:
        names = {each.name for each in tried if each.taken}
        if rung.needs and rung.needs not in names:
            each = _left_out(rung, f"it needs {rung.needs}")
        else:
            each = attempt(kernels, rung, ends_at - time.monotonic())
        if each.taken:
            kernels = replace(kernels, **rung.changes)
        tried.append(each)
    return Proof(kernels, tuple(tried))


def _left_out(rung: Rung, why: str) -> Trial:
    return Trial(name=rung.name, taken=False, why=why)


def try_apart(subject: Subject, base: Kernels, rung: Rung, limit_s: float) -> Trial:
    """Try a rung in a process of its own, and judge what it found."""
    if limit_s <= 0:
        return replace(_left_out(rung, "no time was left to try it"), is_late=True)
    task = {
        "subject": asdict(subject),
        "base": asdict(base),
        "rung": asdict(replace(base, **rung.changes)),
    }
    found = _run_apart(task, limit_s)
    if reason := found.get("absent") or found.get("wrong"):
        return replace(
            _left_out(rung, reason), is_wrong="wrong" in found, is_late=found.get("late", False)
        )
    base_s, rung_s = (
        sum(found[side][name] for name in rung.judged_by) for side in ("base_s", "rung_s")
    )
    taken = base_s >= _WIN * rung_s
    times = f"{base_s / rung_s:.2f} times as fast ({', '.join(rung.judged_by)})"
    rung_ms, base_ms = (
        {name: 1e3 * seconds for name, seconds in found[side].items()}
        for side in ("rung_s", "base_s")
    )
    return Trial(name=rung.name, taken=taken, why=times, ms=rung_ms, base_ms=base_ms)


def _run_apart(task: ReadOnly, limit_s: float) -> Values:
    """Run a task in a process of its own, and return its result; how it ended is what is wrong if
    it has none.
    """
    with temporary_folder() as folder:
        out = Path(folder, "found.json")
        child = subprocess.Popen(
            [sys.executable, "-m", "specextend.proof.child", str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": folder},
            start_new_session=True,  # what it starts, such as a compiler, ends with it
        )
        try:
            _, said = child.communicate(json.dumps(task), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"wrong": f"it was not done after {limit_s:.0f} s", "late": True}
        finally:
            _end(child)
        if child.returncode < 0:  # SIGKILL is what the kernel sends where memory runs out
            ended_by = signal.Signals(-child.returncode)
            return {"wrong": f"it ended by {ended_by.name}", "late": ended_by is signal.SIGKILL}
        if child.returncode or not out.exists():
            return {
                "wrong": (
                    said.strip().splitlines() or [f"it ended with exit code {child.returncode}"]
                )[-1]
            }
        found: Values = json.loads(out.read_text(encoding="utf-8"))
        return found


def _end(child: subprocess.Popen[str]) -> None:
    """End a process with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
