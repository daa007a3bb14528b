"""Linear layers around weights that are there already."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def linears(weights: Mapping[str, Tensor]) -> nn.ModuleDict:
    """A layer for every `<name>.weight` [out, in], with its `<name>.bias` [out] if there is one.

    Dots of a name become slashes, which nn.ModuleDict takes.
    """
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return nn.ModuleDict(
        {name.replace(".", "/"): linear(weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in names}
    )


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer around weight [out, in] and bias [out]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
