"""Stages of a check that end in every way a stage can end; they import nothing that takes time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from specextend.bench.gpu_check.stage import Row, Setting, SkippedError


def right(setting: Setting) -> Iterator[Row]:
    yield {"shapes": setting.shapes}
    yield {"device": setting.device}


def wrong(setting: Setting) -> Iterator[Row]:
    yield {"error": 0.1}
    yield {"error": 3.0, "wrong": "an error of 3"}


def raising(setting: Setting) -> Iterator[Row]:
    yield {"before": True}
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def dying(setting: Setting) -> Iterator[Row]:
    """Ends as a process does that the operating system kills for memory."""
    yield {"before": True}
    os.kill(os.getpid(), signal.SIGKILL)
    yield {"after": True}


def hanging(setting: Setting) -> Iterator[Row]:
    time.sleep(600)
    yield {}


def lacking(setting: Setting) -> Iterator[Row]:
    import no_such_package  # noqa: F401

    yield {}


def impossible(setting: Setting) -> Iterator[Row]:
    raise SkippedError("this machine has no GPU")
    yield {}
