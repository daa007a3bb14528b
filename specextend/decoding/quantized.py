"""Weights of the target's layers in 8 or 4 bits: `int8` by `layers.RoundedLinear`, others by
torchao.

Embeddings, norms and LM head stay as they are. A scale covers an output, a group of an output's
inputs (`int4`), or inputs of a single token (`int8`, `fp8`), so a document never depends on its
batch. Inputs stay exact in `int4`, and in `int8` with float32; there speculation is lossless in
float32 too. `fp8` runs in bfloat16 only.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from specextend.core import how_to_install
from specextend.decoding.device import compute_capability, traits_of
from specextend.decoding.layers import (
    GROUP,
    CompiledLinear,
    FusedLayer,
    RoundedLinear,
    compiled_kernel,
)
from specextend.models.model_files import Scheme

_LEAST_CAPABILITY = {"int8": (7, 5), "int4": (8, 0), "fp8": (8, 9)}
_MULTIPLE = {"int8": 8, "int4": GROUP, "fp8": 16}
"""Divisor of a product's inputs and, except for `int4`, outputs; torchao silently skips others."""


def check_device(scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if a device does not serve a scheme and `dtype`; None serves always."""
    if scheme is None:
        return
    capability = compute_capability(device)
    if capability is None and scheme == "fp8":
        raise _refused(scheme, "runs on a GPU only")
    if capability is not None and capability < (least := _LEAST_CAPABILITY[scheme]):
        raise _refused(
            scheme,
            f"needs a GPU of compute capability {least[0]}.{least[1]} or higher, this one has "
            f"{capability[0]}.{capability[1]}",
        )
    if capability is not None and scheme != "int8" and dtype != torch.bfloat16:
        raise ValueError(f"target.quantize {scheme} needs target.dtype bfloat16 on a GPU")


def _refused(scheme: Scheme, why: str) -> ValueError:
    instead = "leave it unset" if scheme == "int8" else "choose int8"
    return ValueError(f"target.quantize {scheme} {why}; {instead}")


def check_quantizable(model: Any, scheme: Scheme) -> None:
    """Check the layers of a causal LM, which may be on `meta`.

    Raises:
        ValueError: An extra is missing, or the shape of a product does not suit the scheme.
    """
    if scheme != "int8" and find_spec("torchao") is None:
        raise ValueError(
            f"target.quantize {scheme} needs the extra `quantize`: {how_to_install('quantize')}"
        )
    multiple = _MULTIPLE[scheme]
    for outputs, inputs in _shapes(model):
        if inputs % multiple or (scheme != "int4" and outputs % multiple):
            raise _refused(
                scheme,
                f"takes products in multiples of {multiple}, and the target has one of {inputs} "
                f"inputs and {outputs} outputs",
            )


def saved_bytes(model: Any, scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> int:
    """Compute how many bytes quantization saves for a causal LM, which may be on `meta`.

    A CPU keeps the sums of groups of bfloat16's products.
    """
    if scheme is None:
        return 0
    num_outputs, num_weights = (
        sum(each) for each in zip(*((o, o * i) for o, i in _shapes(model)), strict=True)
    )
    of_weights = num_weights // 2 if scheme == "int4" else num_weights
    of_scales = 2 * dtype.itemsize * num_weights // GROUP if scheme == "int4" else 4 * num_outputs
    if scheme == "int8" and dtype == torch.bfloat16 and traits_of(device).packs_linears:
        of_scales += 4 * num_weights // GROUP + 4 * num_outputs  # sums of groups, and biases
    return num_weights * dtype.itemsize - of_weights - of_scales


def _shapes(model: Any) -> list[tuple[int, int]]:
    linears = (module for module in model.model.layers.modules() if isinstance(module, nn.Linear))
    return [(linear.out_features, linear.in_features) for linear in linears]


def quantized(layer: FusedLayer, scheme: Scheme | None) -> FusedLayer:
    """Quantize the products of a layer in place, and return it."""
    if scheme is None:
        return layer
    products = {
        name: child for name, child in layer.named_children() if isinstance(child, nn.Linear)
    }
    device = layer.input_norm.weight.device
    if scheme == "int8":
        on_cpu = traits_of(device).packs_linears
        is_served = on_cpu and layer.input_norm.weight.dtype == torch.bfloat16
        kernel = compiled_kernel() if is_served else None
        for name, linear in products.items():
            inputs = linear.in_features
            rounded = RoundedLinear(linear, GROUP if on_cpu and inputs % GROUP == 0 else inputs)
            is_taken = kernel is not None and kernel.products.takes(rounded.weight)
            setattr(layer, name, CompiledLinear(rounded, kernel) if is_taken else rounded)
        return layer
    from torchao.quantization import quantize_

    quantize_(layer, _config(scheme, device))
    for name, linear in products.items():
        assert hasattr(linear.weight, "qdata"), f"torchao left {name} as it was"
    return layer


def _config(scheme: Scheme, device: torch.device) -> Any:
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig as Float8Config
    from torchao.quantization import Int4WeightOnlyConfig, PerRow
    from torchao.quantization.quantize_.common import KernelPreference

    if scheme == "fp8":
        return Float8Config(
            granularity=PerRow(),
            kernel_preference=KernelPreference.TORCH,
            set_inductor_config=False,
        )
    if traits_of(device).packs_linears:
        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    return Int4WeightOnlyConfig(
        group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
