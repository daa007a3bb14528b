"""Linear layers with weights packed once for the CPU's matrix units.

torch's own bf16 linear reorders its weight for oneDNN in every call, which costs about as much as the product itself
where there are few rows. `docs/log.md` has the measurement.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS = 16
"""Rows that the packing is made for; any number works."""


class PackedLinear(nn.Module):
    """A bf16 linear layer on the CPU. Same product, fp32 accumulation as before."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of x [..., in]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing pays and works here: bf16 on a CPU that torch has oneDNN bf16 kernels for."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module` by its packed form, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
