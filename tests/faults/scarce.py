"""The real engine on a machine that fails on purpose: too little memory for a forward, a dead device, a hang."""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specextend.models.loading import load_engine

PLENTY = 1 << 40


@dataclass(frozen=True)
class Forward:
    """What the target is asked to run."""

    num_sequences: int
    num_new: int
    """Tokens of each."""
    longest: int
    """Tokens of the longest, with the new ones."""
    is_step: bool
    """A verification or a plain step; otherwise a prefill chunk."""

    @property
    def num_rows(self):
        return self.num_sequences * self.num_new


def before_forwards(engine, look):
    """Let `look` see every forward of the target before it runs; what it raises, the forward raises."""
    run = engine.target.forward_with_features

    def watched(token_ids, positions, plan, layers):
        is_step = plan.mask is not None or token_ids.shape[1] == 1
        look(Forward(*token_ids.shape, max(plan.lengths), is_step))
        return run(token_ids, positions, plan, layers)

    engine.target.forward_with_features = watched


def run_out():
    """What the allocator says when it is asked for a petabyte."""
    torch.empty(1 << 50)


@dataclass(frozen=True)
class Memory:
    """What there is room for, in rows of a step, in tokens of a prefill chunk, and in tokens of a document."""

    step_rows: int = PLENTY
    chunk: int = PLENTY
    document: int = PLENTY

    def allow(self, forward):
        """Raise what the allocator raises where there is no room."""
        if forward.num_rows > (self.step_rows if forward.is_step else self.chunk) or forward.longest > self.document:
            run_out()


@dataclass(frozen=True)
class Breaks:
    """Makes engines whose device dies or hangs, or whose process is killed, while several sequences decode: once,
    leaving a file behind.
    """

    how: Literal["device", "hang", "kill"]
    marker: Path

    def __call__(self, config):
        engine = load_engine(config)
        before_forwards(engine, self.look)
        return engine

    def look(self, forward):
        """Do it when it is time to."""
        if forward.num_sequences == 1 or self.marker.exists():
            return
        self.marker.touch()
        if self.how == "hang":
            threading.Event().wait()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
