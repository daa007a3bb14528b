"""The attention backends by name.

A backend is a function of type `Attend`. `reference.py` is the specification, which every other one must equal. Kernels
of torch and of flash-attn are in `torch_kernels.py`, ours for a CPU in `compiled/`, the one in Triton in
`tree_kernel.py`.

Shapes: `L` layers, `B` sequences, `T` queries, `S` keys, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

import logging
import time
from collections.abc import Callable, Mapping
from functools import cache
from math import inf

import torch
from torch import Tensor

from specextend.attention.plain import LayerKernels, attend_reference
from specextend.attention.plan import Attend, KeySpan
from specextend.attention.torch_kernels import (
    TORCH,
    attend_by_head,
    attend_cuda,
    attend_with,
    find_flash_attn,
)
from specextend.attention.trials import Call, Heads, what_is_wrong
from specextend.core import how_to_install

BACKENDS = ("reference", "sdpa", "compiled", "flash", "triton")
_FAULT_ROWS = 512
_ENOUGH_S = 0.2
"""Seconds of runs after which none is repeated."""

_log = logging.getLogger(__name__)


def load_backend(name: str, device: torch.device) -> Attend:
    """Return the backend called `name`; `auto` is the one that a CPU always runs, or for a GPU torch's own.

    Raises:
        ValueError: no such backend, its package is not installed, or it does not run on the device.
    """
    if name == "auto":
        return attend_on_cpu if device.type == "cpu" else attend_cuda
    if name not in BACKENDS:
        raise ValueError(f"attention.backend must be one of auto, {', '.join(BACKENDS)}, got {name!r}")
    if name == "reference":
        return attend_reference
    if name == "flash":
        if (kernel := find_flash_attn()) is None:
            raise ValueError(f"attention.backend flash needs the flash extra: {how_to_install('flash')}")
        if device.type == "cpu":
            raise ValueError("attention.backend flash runs on a GPU only; choose auto")
        return attend_with(kernel, attend_cuda)
    if name == "triton":
        return load_triton(device)
    if device.type == "cpu":
        return load_compiled() if name == "compiled" else attend_by_head
    if name == "sdpa":
        return attend_cuda
    raise ValueError(f"attention.backend {name} runs on a CPU only; choose auto, reference, sdpa, flash or triton")


@cache
def compiled_is_right(dtype: torch.dtype) -> bool:
    """Compile our kernel for a CPU and tensors of `dtype`, or read it from disk; return True if it is right here."""
    try:
        from specextend.attention.compiled.attend import ELEMENTS, attend_compiled, can_compile
    except ImportError:
        return False
    if dtype not in ELEMENTS or not can_compile(dtype):
        return False
    heads = Heads(4, 2, 64, dtype, torch.device("cpu"))
    calls = Call("plain", 1, (130,)), Call("tree", 5, (65, 0)), Call("causal", 70, (65,))
    wrong = next(filter(None, (what_is_wrong(attend_compiled, call, heads, _FAULT_ROWS) for call in calls)), "")
    if wrong:
        _log.warning("the compiled attention kernel is not used, because it is wrong on this processor: %s", wrong)
    return not wrong


def attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by our compiled kernel where it is right and takes such tensors, else by torch's flash kernel."""
    if not compiled_is_right(q.dtype):
        return attend_by_head(q, k, v, span, scale)
    return load_compiled()(q, k, v, span, scale)


@cache
def load_compiled() -> Attend:
    """Import the compiled kernel, with `sdpa` for calls that it does not take: a draft's heads may have another size.

    Raises:
        ValueError: numba is not installed.
    """
    try:
        from specextend.attention.compiled.attend import attend_compiled, serves
    except ImportError as error:
        raise ValueError(f"attention.backend compiled needs the cpu extra: {how_to_install('cpu')}") from error

    def compiled(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        kernel = attend_compiled if serves(q.shape[3], q.dtype) else attend_by_head
        return kernel(q, k, v, span, scale)

    return compiled


def load_triton(device: torch.device) -> Attend:
    """Import the Triton kernel. Calls that it does not take, such as chunks of a prompt, go to flash-attn or `sdpa`.

    Raises:
        ValueError: triton is not installed, or the device is a CPU, where it is only interpreted for tests.
    """
    try:
        from specextend.attention.tree_kernel import attend_triton, is_interpreted, serves
    except ImportError as error:
        raise ValueError("attention.backend triton needs the package triton: pip install triton") from error
    if device.type == "cpu" and not is_interpreted():
        raise ValueError("attention.backend triton runs on a GPU only; choose auto")
    otherwise = load_backend("sdpa", device)
    if device.type != "cpu" and (flash := find_flash_attn()) is not None:
        otherwise = attend_with(flash, attend_cuda)

    def triton(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        return (attend_triton if serves(q, span) else otherwise)(q, k, v, span, scale)

    return triton


def load_layer_kernels(name: str, device: torch.device) -> LayerKernels:
    """Return the kernels of a layer that go with the backend called `name`: Triton's with `triton`, else torch's own.

    Raises:
        ValueError: as `load_triton`.
    """
    if name != "triton":
        return TORCH
    load_triton(device)
    from specextend.attention.layer_kernels import TRITON

    return TRITON


def shortest_runs(candidates: Mapping[str, Callable[[], object]], num_runs: int) -> dict[str, float]:
    """Return the seconds of the shortest of some runs of each candidate, after a first one that builds what they use.

    They take turns, so that a machine that is busy for a while slows all of them. Long runs say enough before there are
    so many.
    """
    for run in candidates.values():
        run()
    best = dict.fromkeys(candidates, inf)
    started_at = time.perf_counter()
    for number in range(num_runs):
        if number and time.perf_counter() - started_at > _ENOUGH_S:
            break
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best
