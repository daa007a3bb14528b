"""A model's layers, replaced by faster ones: decoder layers in fewer operators, linear layers in their fastest form.

A decoder layer of few rows is a chain of small operators, so each one that is left out counts. In fp32 the logits are
the stock layer's; in bf16 fewer results are rounded between two operators.

A linear layer in bf16 on a CPU is laid out once, in the way that is measured to be fastest: torch's own reorders the
weight for oneDNN in every call, which can cost as much as the product of few rows (`docs/log.md`). Product and fp32
accumulation are the same.

Shapes: `L` layers, `R` rows (the new tokens of all sequences), `C` hidden size, `K` key heads, `S` cache rows, `D` head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from specextend.attention.backends import shortest_runs
from specextend.attention.plan import Attend, AttentionPlan, attend_plan
from specextend.attention.reference import HeadNorms, LayerKernels
from specextend.attention.trials import Trial, what_is_wrong_in_a_product
from specextend.core import counted
from specextend.decoding.device import multiplies_bf16, traits_of, warn_of_slow_bf16

FEW_ROWS = (1, 16)
"""Rows of the products that decide: a plain step and a tree."""
MANY_ROWS = 256
"""Rows of a product like those of a prompt, which the fastest layer for few rows must not slow down."""
_SLACK = 1.1
"""How many times as long as the fastest a layer may take for many rows."""
_RUNS = 3
_READ_BYTES = 64 << 20
"""Weights that few rows are multiplied with: more than the caches of a processor hold, so that memory is read."""
_MULTIPLIED_BYTES = 8 << 20
"""Weights that many rows are multiplied with."""

Pack = Callable[[nn.Linear], nn.Module]


def fuse(model: Any, finish: Callable[[FusedLayer], FusedLayer]) -> None:
    """Replace the decoder layers of a causal LM and its norms in place, by those of `FusedLayer` and `Norm`.

    For the architectures of `models.ARCHITECTURES`, which differ in biases and in norms of queries and keys. Layers go
    to the model's device one after the other, and what `finish` makes of each stays there.
    """
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = finish(FusedLayer(layer.to(model.device)))
    model.model.norm = Norm(model.model.norm)


class Norm(nn.Module):
    """RMSNorm in one operator, in fp32 inside, rounded once."""

    def __init__(self, norm: Any) -> None:
        """Take the stock norm's weight and epsilon."""
        super().__init__()
        self.weight: Tensor = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., C] normalised over its last dimension."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(slots=True)
class Forward:
    """Hold what every layer of a forward is given."""

    kernels: LayerKernels
    attend: Attend
    plan: AttentionPlan
    stored: Tensor
    """The cache [L, 2, K, S, D]."""
    rows: Tensor
    """Its rows [R] that the forward writes."""
    cos: Tensor
    sin: Tensor
    """[R, D], the first half negative."""


class FusedLayer(nn.Module):
    """A decoder layer of Llama's family, q, k and v in one product, gate and up in another, kernels between them.

    With kernels of ours it is eleven in all on a GPU, two of them attention.
    """

    def __init__(self, layer: Any) -> None:
        """Take the weights of a stock layer."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self.input_norm, self.post_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj: nn.Module = attention.o_proj
        self.gate_up = join([mlp.gate_proj, mlp.up_proj])
        self.down_proj: nn.Module = mlp.down_proj
        self.head_norms: HeadNorms | None = None
        if (norm := getattr(attention, "q_norm", None)) is not None:
            self.head_norms = HeadNorms(norm.weight, attention.k_norm.weight, norm.variance_epsilon)

    def forward(self, x: Tensor, run: Forward) -> Tensor:
        """Run x [R, C]; write the rows of the forward to the cache, attend as the plan says."""
        keys, values = run.stored[self._index]
        normed = run.kernels.add_norm(x, None, self.input_norm.weight, self.input_norm.eps)[1]
        qkv = self.qkv(normed).unflatten(-1, (-1, self.head_dim))
        rotated = run.kernels.rotate_heads(qkv, run.cos, run.sin, self.head_norms, keys, values, run.rows)
        query = rotated.unflatten(0, (-1, run.plan.num_new))
        if self._index in run.plan.keep_layers:
            run.plan.queries[self._index] = query
        mixed = attend_plan(run.attend, query, keys, values, run.plan, self._scale).flatten(2).flatten(0, 1)
        residual, normed = run.kernels.add_norm(x, self.o_proj(mixed), self.post_norm.weight, self.post_norm.eps)
        return residual + self.down_proj(run.kernels.gate(self.gate_up(normed)))


def joined_in_one_call(layers: Sequence[Any], scale: float, num_copied: int = 0) -> Any:
    """Return a `compiled.decoder.Decoder` of layers in bf16 on a CPU, or None where it cannot take them or be made."""
    products = [each for layer in layers for each in (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)]
    if not all(isinstance(product, CompiledLinear) for product in products):
        return None
    if len(layers[0].gate_up.packed) % 2:  # blocks of outputs: a gate's and what it gates lie in the same places
        return None
    from specextend.attention.compiled.decoder import Decoder, can_compile

    return Decoder(layers, scale, num_copied) if can_compile(layers[0].head_dim) else None


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a layer around weight [out, in] and bias [out]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Make one layer whose outputs are those of `linears`, which read the same input, side by side."""
    weight = torch.cat([each.weight.detach() for each in linears])
    return linear(weight, None if linears[0].bias is None else torch.cat([each.bias.detach() for each in linears]))


class PackedLinear(nn.Module):
    """A bf16 linear layer on the CPU, with its weight packed once for oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), max(FEW_ROWS))
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class CompiledLinear(nn.Module):
    """A linear layer on the CPU in bf16 or int8, multiplied by the kernel of `attention.compiled.products`."""

    def __init__(self, linear: nn.Linear, kernel: Any) -> None:
        """Take a layer that the kernel takes. kernel: the module."""
        super().__init__()
        self._multiply = kernel.multiply
        weight: Any = linear.weight.detach()
        is_plain = type(weight) is Tensor
        self.packed = kernel.lay_out(weight if is_plain else weight.qdata)
        self.scales = torch.ones(linear.out_features) if is_plain else weight.scale.flatten().float()
        bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        self.bias = bias.float()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        return self._multiply(x, self.packed, self.scales, self.bias)


def pack_if_faster(module: nn.Module) -> tuple[Trial, ...]:
    """Replace every linear layer below `module` by the form that is fastest, in place, if it can be packed.

    It is measured on the module's own layers, which takes a few tenths of a second. Returns what came of each form of
    `linear_forms()`, of which one is taken; nothing if no layer can be packed.
    """
    linears = [child for child in module.modules() if isinstance(child, nn.Linear) and _can_pack(child.weight)]
    if not linears:
        return ()
    forms = linear_forms()
    faults = {name: wrong for name, pack in forms.items() if (wrong := _fault(pack, linears[0]))}
    times = measure_forms(linears, {name: pack for name, pack in forms.items() if name not in faults})
    taken = fastest(times)
    _pack(module, forms[taken])
    return tuple(
        Trial(
            name=f"products: {name}",
            taken=name == taken,
            why=faults.get(name) or ("the fastest for few rows" if name == taken else "slower"),
            ms={counted(rows, "row"): 1e3 * seconds[name] for rows, seconds in times.items() if name in seconds},
            is_wrong=name in faults,
        )
        for name in forms
    )


def taken_form(trials: Iterable[Trial]) -> str:
    """Return the form that `pack_if_faster` took."""
    return next((trial.name.removeprefix("products: ") for trial in trials if trial.taken), "torch")


def _fault(pack: Pack, linear: nn.Linear) -> str:
    """Return what is wrong with a form of a layer."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(FEW_ROWS) + 1, linear.in_features, generator=generator).to(linear.weight.dtype)
    return what_is_wrong_in_a_product(pack(linear)(x), linear, x)


@cache
def linear_forms() -> Mapping[str, Pack]:
    """Return the forms that a bf16 layer can take on this machine, by name: torch's own, oneDNN's, the compiled one."""
    forms: dict[str, Pack] = {"torch": lambda linear: linear}
    if multiplies_bf16():
        forms["onednn"] = PackedLinear
    others = forms.get("onednn", forms["torch"])
    if (kernel := compiled_kernel()) is not None:
        forms["compiled"] = lambda linear: (
            CompiledLinear(linear, kernel) if kernel.takes(linear.weight) else others(linear)
        )
    if len(forms) == 1:
        warn_of_slow_bf16()
    return forms


def compiled_kernel() -> Any:
    """Return the module of the compiled kernel of products, or None if it does not run here."""
    try:
        from specextend.attention.compiled import products
    except ImportError:
        return None
    return products if products.can_multiply() else None


def measure_forms(linears: list[nn.Linear], forms: Mapping[str, Pack]) -> dict[int, dict[str, float]]:
    """Return the seconds of each form for few rows and for many."""
    few = {rows: _shortest(_first(linears, _READ_BYTES), forms, rows) for rows in FEW_ROWS}
    return few | {MANY_ROWS: _shortest(_first(linears, _MULTIPLIED_BYTES), forms, MANY_ROWS)}


def fastest(times: Mapping[int, Mapping[str, float]]) -> str:
    """Return the form that is fastest for few rows among those that are hardly slower than another for many."""
    many = times[MANY_ROWS]
    served = [name for name, seconds in many.items() if seconds <= _SLACK * min(many.values())]
    return min(served, key=lambda name: sum(times[rows][name] for rows in FEW_ROWS))


def _first(linears: list[nn.Linear], num_bytes: int) -> list[nn.Linear]:
    """Return the first layers, at least one, whose weights take no more than so many bytes."""
    sizes = accumulate(linear.weight.nbytes for linear in linears)
    return [linear for linear, size in zip(linears, sizes, strict=True) if size <= num_bytes] or linears[:1]


def _shortest(linears: list[nn.Linear], forms: Mapping[str, Pack], rows: int) -> dict[str, float]:
    """Return the seconds that the layers take in each form, for as many rows."""
    packed = {name: [pack(linear) for linear in linears] for name, pack in forms.items()}
    inputs = [torch.zeros(1, rows, linear.in_features, dtype=linear.weight.dtype) for linear in linears]

    @torch.inference_mode()
    def run(layers: list[nn.Module]) -> None:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    return shortest_runs({name: partial(run, layers) for name, layers in packed.items()}, _RUNS)


def _can_pack(weight: Tensor) -> bool:
    """Return True for a weight that can be packed: bf16 on a CPU."""
    is_plain = type(weight) is nn.Parameter and weight.dtype == torch.bfloat16  # not quantized
    return is_plain and traits_of(weight.device).packs_linears


def _pack(module: nn.Module, pack: Pack) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and _can_pack(child.weight):
            setattr(module, name, pack(child))
        else:
            _pack(child, pack)
