"""What stands between a layer's matrix products, in plain torch: the specification of `layer_kernels.py`.

Everything is computed in fp32 and rounded once, to the dtype of the inputs.

Shapes: `R` rows (the new tokens of all sequences), `C` hidden size, `I` intermediate size, `H` query heads, `K` key
heads, `S` cache rows, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys before RoPE, as Qwen3 has them."""

    query: Tensor
    """[D]"""
    key: Tensor
    """[D]"""
    eps: float


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The three functions of a layer; each is one kernel on a GPU."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    """As `add_norm_reference`."""
    rotate_heads: Callable[[Tensor, Tensor, Tensor, HeadNorms | None, Tensor, Tensor, Tensor], Tensor]
    """As `rotate_heads_reference`."""
    gate: Callable[[Tensor], Tensor]
    """As `gate_reference`."""


def add_norm_reference(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add delta [R, C], if there is one, to x [R, C]; return the sum and its RMSNorm with weight [C], both [R, C]."""
    total = x if delta is None else x + delta
    return total, _norm(total.float(), weight, eps).to(x.dtype)


def rotate_heads_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, rows: Tensor
) -> Tensor:
    """Apply RoPE to the queries and keys in qkv [R, H + 2K, D]; return the queries [R, H, D].

    Keys and values are written to the `rows` [R] int64 of keys and values [K, S, D]. cos and sin are [R, D]; `norms`,
    if there are any, come before RoPE. D is even.
    """
    num_key_heads = len(keys)
    num_heads = qkv.shape[1] - 2 * num_key_heads
    query, key, value = qkv.split([num_heads, num_key_heads, num_key_heads], 1)
    turned = query.float(), key.float()
    if norms is not None:
        turned = _norm(turned[0], norms.query, norms.eps), _norm(turned[1], norms.key, norms.eps)
    query, key = (_rotate(heads, cos, sin).to(qkv.dtype) for heads in turned)
    keys.index_copy_(1, rows, key.transpose(0, 1))
    values.index_copy_(1, rows, value.transpose(0, 1))
    return query


def gate_reference(gate_up: Tensor) -> Tensor:
    """Return SwiGLU [R, I] of gate_up [R, 2I], whose first half is the gate."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to heads [R, h, D] in fp32 with cos and sin [R, D]."""
    low, high = heads.chunk(2, -1)
    return heads * cos.float().unsqueeze(1) + torch.cat([-high, low], -1) * sin.float().unsqueeze(1)


REFERENCE = LayerKernels(add_norm_reference, rotate_heads_reference, gate_reference)
