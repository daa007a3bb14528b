"""A model's layers, replaced by faster ones: decoder layers in fewer operators, linear layers in their fastest form.

A decoder layer of few rows is a chain of small operators, so each one that is left out counts: `FusedLayer` is made of
torch's own, for a CPU, `KernelLayer` of kernels of ours. The stock model stays around the layers: its embedding, its
positions, its loop. In fp32 the logits are the stock layer's; in bf16 fewer results are rounded between two operators.

A linear layer in bf16 on a CPU is laid out once, in the way that is measured to be fastest: torch's own reorders the
weight for oneDNN in every call, which can cost as much as the product of few rows (`docs/log.md`). Product and fp32
accumulation are the same.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from specextend.attention.hybrid import attend_plan
from specextend.attention.layer_reference import HeadNorms, LayerKernels
from specextend.attention.plan import Attend, AttentionPlan
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


def fuse(model: Any, kernels: LayerKernels | None = None) -> bool:
    """Replace the decoder layers and norms of a causal LM in place; return False if its activation is not SiLU.

    For the architectures of `models.ARCHITECTURES`, which differ in biases and in norms of queries and keys. With
    `kernels` its layers are made of them, and each forward must be given the cache as `stored`.
    """
    if model.config.hidden_act != "silu":
        return False
    decoder = model.model
    for index, layer in enumerate(decoder.layers):
        decoder.layers[index] = FusedLayer(layer) if kernels is None else KernelLayer(layer, kernels)
    decoder.norm = FusedNorm(decoder.norm)
    if kernels is None:
        decoder.rotary_emb = SignedRotary(decoder.rotary_emb)
    return True


class FusedNorm(nn.Module):
    """RMSNorm in one operator, in fp32 inside, rounded once."""

    def __init__(self, norm: Any) -> None:
        """Take the stock norm's weight and epsilon."""
        super().__init__()
        self.weight: Tensor = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., C] normalised over its last dimension."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class SignedRotary(nn.Module):
    """The stock model's cosines and sines, laid out for `rotate_half_signed`."""

    def __init__(self, rotary: nn.Module) -> None:
        """Take the stock module, which knows the RoPE type."""
        super().__init__()
        self.rotary = rotary

    @property
    def inv_freq(self) -> Tensor:
        """Return the stock module's inv_freq [D / 2]."""
        return self.rotary.inv_freq  # type: ignore[return-value]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [B, T, 1, D] in x's dtype; the first half of a sine is negative."""
        cos, sin = self.rotary(x, position_ids)
        half = sin.shape[-1] // 2
        sin[..., :half].neg_()
        return cos.unsqueeze(2), sin.unsqueeze(2)


def rotate_half_signed(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to heads [B, T, h, D] with the cosines and signed sines [B, T, 1, D] of `SignedRotary`."""
    swapped = heads.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(heads * cos, swapped, sin)


class JoinedWeights(nn.Module):
    """The weights of a decoder layer of Llama's family, q, k and v in one projection, gate and up in another."""

    def __init__(self, layer: Any) -> None:
        """Take the weights of a stock layer."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_dim
        self.input_norm, self.post_norm = FusedNorm(layer.input_layernorm), FusedNorm(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = (_head_norm(attention, name) for name in ("q_norm", "k_norm"))
        self.qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj: nn.Module = attention.o_proj
        self.gate_up = join([mlp.gate_proj, mlp.up_proj])
        self.down_proj: nn.Module = mlp.down_proj


class FusedLayer(JoinedWeights):
    """A decoder layer in torch's own operators, with joined projections."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any,
        plan: AttentionPlan,
        attend: Attend,
        **_: Any,
    ) -> Tensor:
        """Run hidden_states [B, T, C]; write keys and values through the cache hook, attend as the plan says."""
        qkv = self.qkv(self.input_norm(hidden_states)).unflatten(-1, (-1, self._head_dim))
        rotated, value = self._rotate(qkv, *position_embeddings)
        query, key = rotated[:, :, : self._num_heads], rotated[:, :, self._num_heads :]
        if self._index in plan.keep_layers:
            plan.queries[self._index] = query
        keys, values = past_key_values.update(key.transpose(1, 2), value.transpose(1, 2), self._index)
        mixed = attend_plan(attend, query, keys, values, plan, self._scale)
        residual = hidden_states + self.o_proj(mixed.flatten(2))
        gate, up = self.gate_up(self.post_norm(residual)).chunk(2, -1)
        return residual + self.down_proj(silu(gate).mul_(up))

    def _rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Split qkv [B, T, H + 2K, D] into rotated queries and keys [B, T, H + K, D], and values [B, T, K, D]."""
        turned, value = qkv.split([self._num_heads + self._num_kv_heads, self._num_kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned.split([self._num_heads, self._num_kv_heads], 2)
            turned = torch.cat([self.q_norm(query), self.k_norm(key)], 2)
        return rotate_half_signed(turned, cos, sin), value


class KernelLayer(JoinedWeights):
    """A decoder layer with kernels of ours between its products: eleven in all on a GPU, two of them attention.

    Its kernel for RoPE writes to the cache, so the hook's `update` is not called.
    """

    def __init__(self, layer: Any, kernels: LayerKernels) -> None:
        """Take the weights of a stock layer."""
        super().__init__(layer)
        self._kernels = kernels
        self._head_norms: HeadNorms | None = None
        if self.q_norm is not None and self.k_norm is not None:
            self._head_norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        stored: Tensor,
        plan: AttentionPlan,
        attend: Attend,
        **_: Any,
    ) -> Tensor:
        """Run hidden_states [B, T, C]; write the rows of the plan in stored [L, 2, K, R, D], attend as it says."""
        x = hidden_states.flatten(0, 1)
        keys, values = stored[self._index]
        normed = self._kernels.add_norm(x, None, self.input_norm.weight, self.input_norm.eps)[1]
        qkv = self.qkv(normed).unflatten(-1, (-1, self._head_dim))
        cos, sin = (angles.flatten(0, 1) for angles in position_embeddings)
        rows = plan.new_rows(x.device).flatten()
        rotated = self._kernels.rotate_heads(qkv, cos, sin, self._head_norms, keys, values, rows)
        query = rotated.unflatten(0, hidden_states.shape[:2])
        if self._index in plan.keep_layers:
            plan.queries[self._index] = query
        mixed = attend_plan(attend, query, keys, values, plan, self._scale)
        residual, normed = self._kernels.add_norm(
            x, self.o_proj(mixed.flatten(2).flatten(0, 1)), self.post_norm.weight, self.post_norm.eps
        )
        added = self.down_proj(self._kernels.gate(self.gate_up(normed)))
        return (residual + added).unflatten(0, hidden_states.shape[:2])


def _head_norm(attention: Any, name: str) -> FusedNorm | None:
    norm = getattr(attention, name, None)
    return None if norm is None else FusedNorm(norm)


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Make one layer whose outputs are those of `linears`, which read the same input, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=linears[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return joined


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
    """A bf16 linear layer on the CPU, multiplied by the kernel of `attention.compiled.products`."""

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
    `linear_forms()`; `torch` if nothing is replaced.
    """
    linears = [*_packable(module)]
    if not linears:
        return "torch"
    forms = linear_forms()
    name = fastest(linears, forms)
    _pack(module, forms[name])
    return name


@cache
def linear_forms() -> Mapping[str, Pack]:
    """Return the forms that a bf16 layer can take on this machine, by name: torch's own, oneDNN's, the compiled one."""
    forms: dict[str, Pack] = {"torch": lambda linear: linear, "onednn": PackedLinear}
    try:
        from specextend.attention.compiled import products
    except ImportError:
        return forms
    if products.can_multiply():
        forms["compiled"] = lambda linear: (
            CompiledLinear(linear, products) if products.takes(linear.weight) else PackedLinear(linear)
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
