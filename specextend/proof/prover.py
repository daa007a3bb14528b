"""The candidate kernels of a card, and their proof by separate processes (`child.py`).

The candidates rest on the measurements in `docs/dev/log.md`: a start times nothing. A crash or a
hang costs only its kernel. A node proves once, under a lock, and keeps verdicts until a driver,
library, compiler, shape or our code changes.
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
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from filelock import FileLock
from torch import Tensor

from specextend.attention.backends import Trial, load_backend, load_layer_kernels
from specextend.attention.plain import MAX_QUERIES, LayerKernels
from specextend.attention.plan import Attend, KeySpan
from specextend.core import ReadOnly, Values
from specextend.decoding.device import AMPERE, device_name, toolchain_versions
from specextend.decoding.measurements import keep, read_kept
from specextend.decoding.quantized import Scheme
from specextend.folders import cache_folder, package_version, temporary_folder

LONGEST = 16_000
"""Tokens of the longest text of a proof."""
LIMIT_S = 120.0
"""Seconds without a new verdict before a process is ended; compiling takes most of them."""
_PACKAGES = ("torch", "torchao", "triton", "flash-attn", "transformers")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a worker by name, or by place as `module:object`.

    The defaults are torch's, which need no proof.
    """

    prompts: str = "sdpa"
    """Backend of causal chunks of more than `MAX_QUERIES` tokens."""
    steps: str = "sdpa"
    """Backend of trees, single tokens, and a draft's reading after a step."""
    layers: str = "sdpa"
    graphs: bool = False

    def attend(self, device: torch.device) -> Attend:
        """Return the attention backend. Raises ValueError if it cannot run there."""
        prompts: Attend
        steps: Attend
        prompts, steps = (_named(each, load_backend, device) for each in (self.prompts, self.steps))
        if self.prompts == self.steps:
            return steps

        def chosen(
            q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
        ) -> tuple[Tensor, Tensor]:
            return (prompts if span.causal and q.shape[1] > MAX_QUERIES else steps)(
                q, k, v, span, scale
            )

        chosen.__name__ = f"{self.prompts} {self.steps}"  # step costs are kept for each
        return chosen

    def of_layers(self, device: torch.device) -> LayerKernels:
        """Return the kernels of layers. Raises ValueError if they cannot run there."""
        found: LayerKernels = _named(self.layers, load_layer_kernels, device)
        return found


def _named(name: str, load: Callable[[str, torch.device], Any], device: torch.device) -> Any:
    return resolve_name(name) if ":" in name else load(name, device)


_HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel that may replace torch's."""

    name: str
    field: Literal["prompts", "steps", "layers", "graphs"]
    value: str | bool

    def among(self, kernels: Kernels) -> Kernels:
        """Return `kernels` with this kernel in its field."""
        change: dict[str, Any] = {self.field: self.value}
        return replace(kernels, **change)


TREES = Candidate(name="Triton for trees", field="steps", value="triton")
LAYERS = Candidate(name="Triton for layers", field="layers", value="triton")
FLASH = Candidate(name="flash-attn for prompts", field="prompts", value="flash")
CUDNN = Candidate(name="cuDNN for prompts", field="prompts", value="cudnn")
GRAPHS = Candidate(name="captured steps", field="graphs", value=True)


def candidates_for(capability: tuple[int, int] | None) -> tuple[Candidate, ...]:
    """Return the candidates of a compute capability; captured steps run the others."""
    if capability is None or capability < AMPERE:
        return ()
    return (TREES, LAYERS, FLASH if capability < _HOPPER else CUDNN, GRAPHS)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The shape of a model's layers."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    has_norms: bool = False
    """Whether queries and keys are normalised before RoPE."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The conditions of a proof, as JSON values.

    They leave out documents, batches and cache size, so a proof holds for every run of a pair.
    """

    device: str
    dtype: str
    """Name in torch, such as `bfloat16`."""
    layers: tuple[LayerShape, ...]
    """Shapes of the target's layers, and of the draft's if different."""
    num_drafts: int
    """Most draft tokens of a tree."""
    depth: int
    chunk: int
    """Tokens of a prompt's forward."""
    quantize: Scheme | None = None

    def __post_init__(self) -> None:
        shapes = (
            each if isinstance(each, LayerShape) else LayerShape(**each) for each in self.layers
        )
        object.__setattr__(self, "layers", tuple(shapes))


@dataclass(frozen=True)
class Proof:
    """The kernels taken, and the verdict on each candidate."""

    kernels: Kernels
    trials: tuple[Trial, ...] = ()


def load_proof(subject: Subject, candidates: Sequence[Candidate]) -> Proof:
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
