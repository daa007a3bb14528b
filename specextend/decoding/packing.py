"""Linear layers on a CPU with their weights laid out once, in the way that is measured to be fastest.

torch's own layer reorders a bf16 weight for oneDNN in every call, which can cost as much as the product of few rows
(`docs/log.md`). Product and fp32 accumulation are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from specextend.decoding.device import traits_of

_FEW_ROWS = (1, 16)
"""Rows of the products that decide: a plain step and a tree."""
_MANY_ROWS = 256
"""Rows of a product like those of a prompt, which the fastest layer for few rows must not slow down."""
_SLACK = 1.1
"""How many times as long as the fastest a layer may take for many rows."""
_RUNS = 3
_READ_BYTES = 64 << 20
"""Weights that few rows are multiplied with: more than the caches of a processor hold, so that memory is read."""
_MULTIPLIED_BYTES = 8 << 20
"""Weights that many rows are multiplied with."""

Pack = Callable[[nn.Linear], nn.Module]


class PackedLinear(nn.Module):
    """A bf16 linear layer on the CPU, with its weight packed once for oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), max(_FEW_ROWS))
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class CompiledLinear(nn.Module):
    """A bf16 linear layer on the CPU, multiplied by the kernel of `attention.linear_kernel`."""

    def __init__(self, linear: nn.Linear, kernel: Any) -> None:
        """Take a layer that the kernel takes. kernel: the module."""
        super().__init__()
        self._multiply = kernel.multiply
        self.packed = kernel.lay_out(linear.weight.detach())
        bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        self.bias = bias.float()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        return self._multiply(x, self.packed, self.bias)


def pack_if_faster(module: nn.Module) -> str:
    """Replace every linear layer below `module` by the form that is fastest, in place, if it can be packed.

    It is measured on the module's own layers, which takes a few tenths of a second. Returns the form, one of
    `packings()`; `torch` if nothing is replaced.
    """
    linears = [*_packable(module)]
    if not linears:
        return "torch"
    forms = packings()
    name = fastest(linears, forms)
    _pack(module, forms[name])
    return name


@cache
def packings() -> Mapping[str, Pack]:
    """Return the forms that a bf16 layer can take on this machine, by name: torch's own, oneDNN's, the compiled one."""
    forms: dict[str, Pack] = {"torch": lambda linear: linear, "onednn": PackedLinear}
    try:
        from specextend.attention import linear_kernel
    except ImportError:
        return forms
    if linear_kernel.can_multiply():
        forms["compiled"] = lambda linear: (
            CompiledLinear(linear, linear_kernel) if linear_kernel.takes(linear.weight) else PackedLinear(linear)
        )
    return forms


def fastest(linears: list[nn.Linear], forms: Mapping[str, Pack], clock: Callable[[], float] = time.perf_counter) -> str:
    """Return the form that is fastest for few rows among those that are hardly slower than another for many."""
    few = [_shortest(_first(linears, _READ_BYTES), forms, rows, clock) for rows in _FEW_ROWS]
    many = _shortest(_first(linears, _MULTIPLIED_BYTES), forms, _MANY_ROWS, clock)
    served = [name for name in forms if many[name] <= _SLACK * min(many.values())]
    return min(served, key=lambda name: sum(seconds[name] for seconds in few))


def _first(linears: list[nn.Linear], num_bytes: int) -> list[nn.Linear]:
    """Return the first layers, at least one, whose weights take no more than so many bytes."""
    sizes = accumulate(linear.weight.nbytes for linear in linears)
    return [linear for linear, size in zip(linears, sizes, strict=True) if size <= num_bytes] or linears[:1]


def _shortest(
    linears: list[nn.Linear], forms: Mapping[str, Pack], rows: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the seconds of the shortest of some runs for each form; the forms take turns."""
    packed = {name: [pack(linear) for linear in linears] for name, pack in forms.items()}
    inputs = [torch.zeros(1, rows, linear.in_features, dtype=linear.weight.dtype) for linear in linears]
    runs = [{name: _seconds(layers, inputs, clock) for name, layers in packed.items()} for _ in range(1 + _RUNS)][1:]
    return {name: min(run[name] for run in runs) for name in forms}


@torch.inference_mode()
def _seconds(layers: list[nn.Module], inputs: list[Tensor], clock: Callable[[], float]) -> float:
    begin = clock()
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)
    return clock() - begin


def _packable(module: nn.Module) -> Iterator[nn.Linear]:
    """Find the linear layers that oneDNN can pack: bf16 on a CPU with kernels for it, and not packed yet."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for child in module.modules():
        if (
            isinstance(child, nn.Linear)
            and child.weight.dtype == torch.bfloat16
            and traits_of(child.weight.device).packs_linears
        ):
            yield child


def _pack(module: nn.Module, pack: Pack) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, pack(child))
        else:
            _pack(child, pack)
