"""Offline summarisation of long documents with SpecExtend decoding: `run`, or a `Summarizer`."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from specextend.folders import keep_caches_private

if TYPE_CHECKING:
    from specextend.config import RunConfig
    from specextend.core import Completion, Request, SamplingParams
    from specextend.data.figures import find_figures
    from specextend.job import RunResult, run
    from specextend.models.loading import load_engine
    from specextend.summarizer import Summarizer

__all__ = [
    "Completion",
    "Request",
    "RunConfig",
    "RunResult",
    "SamplingParams",
    "Summarizer",
    "find_figures",
    "load_engine",
    "run",
]

_OWNERS = {
    "Completion": "specextend.core",
    "Request": "specextend.core",
    "RunConfig": "specextend.config",
    "RunResult": "specextend.job",
    "SamplingParams": "specextend.core",
    "Summarizer": "specextend.summarizer",
    "find_figures": "specextend.data.figures",
    "load_engine": "specextend.models.loading",
    "run": "specextend.job",
}


keep_caches_private()  # before torch is imported
# transformers imports torchao if it is there; it warns of other GPUs
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: importing torch takes seconds."""
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    """List the public names too, for `help` and for completion."""
    return sorted({*globals(), *__all__})
