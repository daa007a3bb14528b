"""Faster layers of a model: decoder layers of fewer operators, and compiled linear layers.

In fp32 the logits equal the stock layer's; in bf16 fewer results are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specextend.attention.backends import compiled
from specextend.attention.plain import (
    LEAST_ROWS,
    HeadNorms,
    LayerKernels,
    attend_reference,
    what_differs,
)
from specextend.attention.plan import Attend, AttentionPlan, attend_plan
from specextend.attention.torch_kernels import TORCH
from specextend.decoding.device import multiplies_bf16, traits_of, warn_of_slow_bf16

PRODUCTS = ("qkv", "o_proj", "gate_up", "down_proj")
FUSED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that become `FusedLayer`."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
GROUP = 64
"""Inputs that share a scale, in rows of 8 bits on a CPU and in weights of 4 bits."""
_LEAST = 2.0**-100
"""Least absolute maximum of a group, for groups of zeros."""
_ROUNDINGS = 8
"""Roundings by which a layer's output may differ from fp32."""


def fuse(model: Any, finish: Callable[[FusedLayer], FusedLayer]) -> None:
    """Replace the decoder layers and the final norm of a causal LM in place.

    Layers move to the model's device one at a time. `finish` turns a layer into the layer that
    stays.
    """
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = finish(FusedLayer(layer.to(model.device)))
    model.model.norm = norm(model.model.norm)


def why_not_fused(config: Any) -> str:
    """Return why `FusedLayer` does not compute a config, or an empty text."""
    rope = getattr(config, "rope_parameters", None) or {}
    window = getattr(config, "sliding_window", None)
    if config.model_type not in FUSED:
        return f"is of type {config.model_type!r}"
    if config.hidden_act != "silu":
        return f"has the activation {config.hidden_act!r}"
    if rope.get("rope_type") not in ROPE_TYPES:
        return f"has RoPE type {rope.get('rope_type')!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "rotates only a part of each head (partial_rotary_factor)"
    if others := {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
        return f"has layers of type {', '.join(sorted(others))}"
    if window is not None and window < context_length(config):
        return f"attends through a sliding window of {window} tokens"
    return ""


def context_length(config: Any) -> int:
    """Return the most tokens of a model.

    `linear` and `yarn` multiply the length before scaling. `max_position_embeddings` is this length
    (Vicuna 16k, Qwen2.5) or the product (Qwen3 with YaRN); with `llama3` always the product.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    longest = int(config.max_position_embeddings)
    # families with parameters by type of layer, as Gemma 3, give the length after scaling
    if rope.get("rope_type") not in ("linear", "yarn"):
        return longest
    before = rope.get("original_max_position_embeddings") or longest
    return max(longest, int(before * (rope.get("factor") or 1.0)))


def norm(stock: Any) -> Any:
    """Make a norm with a stock norm's weight: fp32 inside, rounded once."""
    made = nn.RMSNorm(len(stock.weight), stock.variance_epsilon, device="meta")
    made.weight = nn.Parameter(stock.weight, requires_grad=False)
    return made


@dataclass(slots=True)
class Forward:
    """The arguments of all layers in a forward."""

    kernels: LayerKernels
    attend: Attend
    plan: AttentionPlan
    stored: Tensor
    """Cache [L, 2, K, S, D]."""
    rows: Tensor
    cos: Tensor
    sin: Tensor
    """[R, D], as `cos`; the first half is negative."""


class FusedLayer(nn.Module):
    """A decoder layer of Llama's family with joint products."""

    def __init__(self, layer: Any):
        super().__init__()
        attention = layer.self_attn
        mlp = layer.mlp
        self._index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self.input_norm, self.post_norm = (
            norm(layer.input_layernorm),
            norm(layer.post_attention_layernorm),
        )
        self.qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj: nn.Module = attention.o_proj
        self.gate_up = join([mlp.gate_proj, mlp.up_proj])
        self.down_proj: nn.Module = mlp.down_proj
        self.head_norms: HeadNorms | None = None
        if (of_query := getattr(attention, "q_norm", None)) is not None:
            self.head_norms = HeadNorms(
                of_query.weight, attention.k_norm.weight, of_query.variance_epsilon
            )

    def forward(self, x: Tensor, run: Forward) -> Tensor:
        """Run x [R, C]: write new rows to the cache, and attend by the plan.

        The last layer returns [B, C] if the plan has `ends_only`.
        """
        plan = run.plan
        keys, values = run.stored[self._index]
        normed = run.kernels.add_norm(x, None, self.input_norm.weight, self.input_norm.eps)[1]
        multiply = run.kernels.multiply
        qkv = multiply(self.qkv, normed).unflatten(-1, (-1, self.head_dim))
        rotated = run.kernels.rotate_heads(
            qkv, run.cos, run.sin, self.head_norms, keys, values, run.rows
        )
        query = rotated.unflatten(0, (-1, plan.num_new))
        if self._index in plan.keep_layers:
            plan.queries[self._index] = query
        if plan.ends_only and self._index == len(run.stored) - 1:
            x = x.unflatten(0, query.shape[:2])[:, -1].contiguous()
            query = query[:, -1:]
            plan = replace(plan, num_new=1)
        mixed = (
            attend_plan(run.attend, query, keys, values, plan, self._scale).flatten(2).flatten(0, 1)
        )
        residual, normed = run.kernels.add_norm(
            x, multiply(self.o_proj, mixed), self.post_norm.weight, self.post_norm.eps
        )
        gated = run.kernels.gate(multiply(self.gate_up, normed))
        return residual + multiply(self.down_proj, gated)


def joined_in_one_call(layers: Sequence[Any], scale: float) -> Any:
    """Return a `compiled.calls.Decoder` of layers, or None if they do not suit it."""
    if not are_compiled(getattr(layer, name) for layer in layers for name in PRODUCTS):
        return None
    # blocks of gates and of gated outputs must align
    if len(layers[0].gate_up.packed) % 2:
        return None
    kernel = compiled_kernel()
    return (
        kernel.Decoder(layers, scale) if kernel.serves(layers[0].head_dim, torch.bfloat16) else None
    )


def are_compiled(linears: Iterable[nn.Module]) -> bool:
    """Return True if all layers are compiled."""
    return all(isinstance(each, CompiledLinear) for each in linears)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a layer from weight [out, in] and bias [out]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Join layers of the same input into a layer with all outputs."""
    weight = torch.cat([each.weight.detach() for each in linears])
    return linear(
        weight,
        None if linears[0].bias is None else torch.cat([each.bias.detach() for each in linears]),
    )


class RoundedLinear(nn.Module):
    """A linear layer with weights in 8 bits, scaled by output.

    Inputs in 16 bits are rounded to 8, scaled by groups of a row; inputs in fp32 stay exact.
    """

    def __init__(self, linear: nn.Linear, group: int):
        """Quantize a layer, for inputs with a scale for each `group`."""
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True).clamp_min(_LEAST) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        is_rounded = x.dtype != torch.float32
        sums = self._multiply_rounded(x) if is_rounded else x @ self.weight.float().T
        product = sums * self.scale.T
        return (product if self.bias is None else product + self.bias).to(x.dtype)

    def _multiply_rounded(self, x: Tensor) -> Tensor:
        """Multiply x by the weight without scales; return [..., out] in fp32."""
        groups = x.float().flatten(0, -2).unflatten(1, (-1, self._group))
        largest = groups.abs().amax(-1, keepdim=True).clamp_min(_LEAST)
        # a number divided by a tensor would be rounded twice
        factors = torch.full_like(largest, 127) / largest
        rounded = (groups * factors).round().to(torch.int8)
        rounded = pad(rounded, (0, 0, 0, 0, 0, max(0, LEAST_ROWS - len(groups))))
        sums = torch.zeros(len(groups), len(self.weight), device=x.device)
        for index, part in enumerate(self.weight.split(self._group, 1)):
            product = torch._int_mm(rounded[:, index], part.T)[: len(groups)]
            sums += product * (largest[:, index] / 127)
        return sums.unflatten(0, x.shape[:-1])


class CompiledLinear(nn.Module):
    """A linear layer in bf16 or int8, multiplied by `attention.compiled.products`."""

    def __init__(self, linear: nn.Linear | RoundedLinear, kernel: Any):
        super().__init__()
        weight = linear.weight.detach()
        self.packed = kernel.products.lay_out(weight)
        self.scales = torch.ones(len(weight))
        if isinstance(linear, RoundedLinear):
            self.scales = linear.scale.flatten()
        bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        self.bias = bias.float()
        self.product = kernel.product_of(self.packed, self.scales, self.bias)
        """Record for calls of several products."""
        self._linear = kernel.Linear(self.product)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        product: Tensor = self._linear.multiply(x)
        return product


def pack(module: nn.Module) -> None:
    """Replace linear layers in place by compiled layers, where the kernel takes them."""
    kernel = compiled_kernel()
    linears = {name: child for name, child in module.named_modules() if _is_plain_bf16(child)}
    if kernel is None and linears and not multiplies_bf16():
        warn_of_slow_bf16()
    for name, linear in linears.items():
        if kernel is not None and kernel.products.takes(linear.weight):
            module.set_submodule(name, CompiledLinear(linear, kernel))


def _is_plain_bf16(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
        return False  # a subclass may compute something else
    return module.weight.dtype == torch.bfloat16 and traits_of(module.weight.device).packs_linears


@cache
def compiled_kernel() -> Any:
    """Return the module of compiled calls, or None if it is missing or wrong here."""
    calls = compiled()
    if calls is None or not {"avx2", "fma"} <= calls.tiles.processor_features():
        return None
    return calls if calls.can_make(calls.phases.kernel) and _computes_a_layer(calls) else None


@torch.inference_mode()
def _computes_a_layer(kernel: Any) -> bool:
    """Return True if compiled random layers, in bf16 and int8, agree with torch in fp32."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    def product(num_outputs: int) -> nn.Linear:
        return linear(draw(num_outputs, 128) / 8, draw(num_outputs))

    attention = SimpleNamespace(layer_idx=0, head_dim=32, scaling=0.2, o_proj=product(128))
    attention.q_proj, attention.k_proj, attention.v_proj = product(128), product(64), product(64)
    mlp = SimpleNamespace(gate_proj=product(128), up_proj=product(128), down_proj=product(128))
    stock = SimpleNamespace(weight=draw(128), variance_epsilon=1e-5)
    layer = FusedLayer(
        SimpleNamespace(
            self_attn=attention, mlp=mlp, input_layernorm=stock, post_attention_layernorm=stock
        )
    )
    plan = AttentionPlan([0], [9], 9)
    stored = draw(1, 2, 2, 16, 32)
    inputs = draw(9, 128), draw(9, 32), draw(9, 32)
    x, *angles = (each.float() for each in inputs)
    run = Forward(TORCH, attend_reference, plan, stored.float(), torch.arange(9), *angles)
    rounded = deepcopy(layer)
    for name in PRODUCTS:
        setattr(rounded, name, RoundedLinear(getattr(rounded, name), GROUP))
    for each in (layer, rounded):
        exact = deepcopy(each).float()(x, run)
        for name in PRODUCTS:
            setattr(each, name, CompiledLinear(getattr(each, name), kernel))
        found = kernel.Decoder([each], attention.scaling).run(*inputs, plan, stored, ())[0]
        if what_differs("", found, exact, _ROUNDINGS):
            return False
    return True
