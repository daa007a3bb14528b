"""The attention backends by name.

A backend is a function of type `Attend`. `plain.py` is the specification, which every other one
must equal. Kernels of torch and of flash-attn are in `torch_kernels.py`, ours for a CPU in
`compiled/`, the one in Triton in `tree_kernel.py`.

Shapes: `L` layers, `B` sequences, `T` queries, `S` keys, `R` cache rows, `H` query heads, `K` key
heads, `D` head size.
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

from specextend.attention.correctness import what_is_wrong
from specextend.attention.plain import LayerKernels, attend_reference
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
"""Seconds of runs after which none is repeated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The verdict on a kernel, or on another change of how a model computes."""

    name: str
    taken: bool
    why: str
    """Why it was taken or left out."""
    is_wrong: bool = False
    """True if it can run here and is not right."""
    is_final: bool = True
    """False if another try may find something else, as where it could not be built."""

    def __str__(self) -> str:
        return f"{self.name}: {'taken' if self.taken else 'left out'}, {self.why}"


def load_backend(name: str, device: torch.device) -> Attend:
    """Return the backend called `name`, one of `decoding_options.Backend`, or `cudnn`, for prompts;
    `auto` is the one that a CPU always runs, or for a GPU torch's own.

    Raises:
        ValueError: its package is not installed, or it does not run on the device.
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
    """Compile our kernel for a CPU and tensors of `dtype`, or read it from disk; return True if it
    is right here.
    """
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
    for of_mask in ({}, {"mask": mask.unsqueeze(0)}, {"causal": True}):
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
    """Attend by our compiled kernel where it is right and takes such heads, else by torch's flash
    kernel.
    """
    kernel = compiled() if compiled_is_right(q.dtype) else None
    attend = (
        kernel.attend_compiled if kernel and kernel.serves(q.shape[3], q.dtype) else attend_by_head
    )
    return attend(q, k, v, span, scale)


@cache
def compiled() -> Any:
    """Return the module of the compiled calls, or None where numba is not installed."""
    try:
        return import_module("specextend.attention.compiled.calls")
    except ImportError:
        return None


def load_triton(device: torch.device) -> Attend:
    """Import the Triton kernel. Calls that it does not take, such as chunks of a prompt, go to
    flash-attn or `sdpa`.

    Raises:
        ValueError: triton is not installed, or the device is a CPU, where it is only
        interpreted for tests.
    """
    try:
        from specextend.attention.tree_kernel import attend_triton, is_interpreted, serves
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
    """Return the kernels of a layer that go with the backend called `name`: Triton's with `triton`,
    else torch's own.

    Raises:
        ValueError: as `load_triton`.
    """
    if name != "triton":
        return TORCH
    load_triton(device)
    from specextend.attention.layer_kernels import TRITON

    return TRITON


def shortest_runs(
    candidates: Mapping[str, Callable[[], object]], num_runs: int
) -> dict[str, float]:
    """Return the seconds of the shortest of some runs of each candidate, after a first one that
    builds what they use.

    They take turns, so that a machine that is busy for a while slows all of them. Long runs say
    enough before there are so many.
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
