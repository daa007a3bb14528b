"""Linear layers on a CPU with their weights packed once, where that is faster.

torch's own layer reorders a bf16 weight for oneDNN in every call, which can cost as much as the product of few rows
(`docs/log.md`). Product and fp32 accumulation are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn

from specextend.decoding.device import traits_of

_ROWS = (1, 16)
"""Rows of the products that decide: a plain step and a tree."""
_RUNS = 3
_PROBED_BYTES = 64 << 20
"""Weights that are measured: more than the caches of a processor hold, so that they are read from memory."""


class PackedLinear(nn.Module):
    """A bf16 linear layer on the CPU, with its weight packed once."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), max(_ROWS))
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_if_faster(module: nn.Module) -> None:
    """Replace every linear layer below `module` by its packed form, in place, if it can be packed and that is faster.

    It is measured on the module's own layers, which takes about 0.1 s.
    """
    linears = [*_packable(module)]
    if linears and packing_is_faster(linears):
        _pack(module)


def packing_is_faster(linears: list[nn.Linear], clock: Callable[[], float] = time.perf_counter) -> bool:
    """Return True if the packed layers take no longer than torch's own, for one row and for sixteen.

    Both sides take turns, and the shortest of three runs counts.
    """
    sizes = accumulate(linear.weight.nbytes for linear in linears)
    probed = [linear for linear, size in zip(linears, sizes, strict=True) if size <= _PROBED_BYTES] or linears[:1]
    sides: list[list[nn.Module]] = [[PackedLinear(linear) for linear in probed], [*probed]]
    shortest = [0.0, 0.0]
    for rows in _ROWS:
        inputs = [torch.zeros(1, rows, linear.in_features, dtype=linear.weight.dtype) for linear in probed]
        runs = [[_seconds(side, inputs, clock) for side in sides] for _ in range(1 + _RUNS)][1:]
        shortest = [before + min(times) for before, times in zip(shortest, zip(*runs, strict=True), strict=True)]
    return shortest[0] <= shortest[1]


@torch.inference_mode()
def _seconds(side: list[nn.Module], inputs: list[Tensor], clock: Callable[[], float]) -> float:
    begin = clock()
    for layer, x in zip(side, inputs, strict=True):
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


def _pack(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            _pack(child)
