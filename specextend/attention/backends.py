"""The attention backends by name, and the trial of each kernel.

A backend is a function of type `Attend`; `plain.py` is the specification.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import inf
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plain import LayerKernels, attend_reference, what_is_wrong
from specextend.attention.plan import Attend, KeySpan
from specextend.attention.torch_kernels import (
    TORCH,
    attend_by_head,
    attend_cuda,
    attend_cudnn,
    attend_with,
    find_flash_attn,
)
from specextend.core import how_to_install

_ENOUGH_S = 0.2
"""Seconds after which no run is repeated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The verdict on a kernel, or on another way to compute."""

    name: str
    taken: bool
    why: str
    is_wrong: bool = False
    """Whether it runs with wrong results."""
    is_final: bool = True
    """Whether another try would find the same."""

    def __str__(self) -> str:
        return f"{self.name}: {'taken' if self.taken else 'left out'}, {self.why}"


def load_backend(name: str, device: torch.device) -> Attend:
    """Load the attention backend called `name`.

    Args:
        name: A value of `decoding_options.Backend`, or `cudnn` for prompts. `auto` is our kernel on
            a CPU and torch's on a GPU.
        device: Device to attend on.

    Raises:
        ValueError: The package is not installed, or the backend does not run on the device.
    """
    is_cpu = device.type == "cpu"
    if name == "reference":
        return attend_reference
    if name == "triton":
        return load_triton(device)
    if name == "flash":
        if (kernel := find_flash_attn()) is None:
            raise ValueError(
                f"attention.backend flash needs the flash extra: {how_to_install('flash')}"
            )
        if is_cpu:
            raise ValueError("attention.backend flash runs on a GPU only; choose auto")
        return attend_with(kernel, attend_cuda)
    if name == "cudnn":
        if is_cpu:
            raise ValueError("cuDNN runs on a GPU only")
        return attend_cudnn
    if name == "compiled" and not is_cpu:
        raise ValueError(
            "attention.backend compiled runs on a CPU only; choose auto, reference, sdpa, flash or "
            "triton"
        )
    if name == "compiled" and compiled() is None:
        raise ValueError(f"attention.backend compiled needs the cpu extra: {how_to_install('cpu')}")
    if is_cpu:
        return attend_by_head if name == "sdpa" else attend_on_cpu
    return attend_cuda


@cache
def compiled_is_right(dtype: torch.dtype) -> bool:
    """Compile or load our CPU kernel for a dtype; return True if its results are right."""
    if (kernel := compiled()) is None or dtype not in kernel.ELEMENTS:
        return False
    if not kernel.can_make(kernel.items.kernel, kernel.ELEMENTS[dtype]):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((1, 70, 4, 64), *[(2, 200, 64)] * 2)
    )
    mask = torch.eye(70, dtype=torch.bool) | (torch.arange(70) == 0)
    for of_mask in (
        {},
        {"mask": mask.unsqueeze(0)},
        {"causal": True},
        {"causal": True, "window": 40},
    ):
        span = KeySpan([3], [135], **of_mask)
        if wrong := what_is_wrong(kernel.attend_compiled, q, k, v, span, 0.125):
            _log.warning(
                "the compiled attention kernel is not used, because on this processor %s", wrong
            )
            return False
    return True


def attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by our compiled kernel if it is right and takes the heads, else by torch's."""
    kernel = compiled() if compiled_is_right(q.dtype) else None
    attend = (
        kernel.attend_compiled if kernel and kernel.serves(q.shape[3], q.dtype) else attend_by_head
    )
    return attend(q, k, v, span, scale)


@cache
def compiled() -> Any:
    """Return the module of compiled calls, or None if numba is not installed."""
    try:
        return import_module("specextend.attention.compiled.calls")
    except ImportError:
        return None


def load_triton(device: torch.device) -> Attend:
    """Import the Triton kernel; flash-attn or `sdpa` attends to calls that it does not take.

    Raises:
        ValueError: triton is not installed, or the device is a CPU outside of its interpreter.
    """
    try:
        from specextend.attention.triton_kernels import attend_triton, is_interpreted, serves
    except ImportError as error:
        raise ValueError(
            "attention.backend triton needs the package triton: pip install triton"
        ) from error
    if device.type == "cpu" and not is_interpreted():
        raise ValueError("attention.backend triton runs on a GPU only; choose auto")
    otherwise = load_backend("sdpa", device)
    if device.type != "cpu" and (flash := find_flash_attn()) is not None:
        otherwise = attend_with(flash, attend_cuda)

    def triton(
        q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
    ) -> tuple[Tensor, Tensor]:
        return (attend_triton if serves(q, span) else otherwise)(q, k, v, span, scale)

    return triton


def load_layer_kernels(name: str, device: torch.device) -> LayerKernels:
    """Load Triton's layer kernels for `triton`, else torch's. Raises ValueError as
    `load_triton`.
    """
    if name != "triton":
        return TORCH
    load_triton(device)
    from specextend.attention.triton_kernels import TRITON

    return TRITON


def shortest_runs(
    candidates: Mapping[str, Callable[[], object]], num_runs: int
) -> dict[str, float]:
    """Time candidates in turns, so that a busy machine slows all of them alike.

    Return the seconds of each candidate's shortest run, without a warm-up.
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
