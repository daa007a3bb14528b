"""The threads on which compiled kernels run: those of torch's own pool.

A second pool, such as numba's own, would slow torch's down: idle threads spin for milliseconds.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def _thread_pool() -> Any:
    """Return `GOMP_parallel` of the OpenMP library that torch uses, or None: then one thread does all."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None


def num_workers() -> int:
    """Return on how many threads `run_on` can run: as many as torch has."""
    return torch.get_num_threads() if _thread_pool() else 1


def run_on(num_threads: int, entry: Any, record: bytes) -> None:
    """Call numba's `entry` with the address of `record` on each of `num_threads`, at most `num_workers()`."""
    if num_threads == 1:
        entry.ctypes(record)
    else:
        _thread_pool()(ctypes.c_void_p(entry.address), record, num_threads, 0)
