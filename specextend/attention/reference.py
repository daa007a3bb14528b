"""The specification of every kernel, in plain torch: slow, obviously right, on any device.

`attend_reference` is what a backend does, `attend_tree_reference` the same with a batch's places and masks as tensors,
so that a kernel can read them without the host, and `REFERENCE` what stands between a layer's matrix products.
Everything is computed in fp32 and rounded once, to the dtype of the inputs.

Shapes: `B` sequences, `T` queries, `S` keys, `M` masked rows, `R` cache rows, or rows of a layer (the new tokens of all
sequences), `C` hidden size, `I` intermediate size, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.attention.plan import KeySpan, additive

MAX_MASKED = 128
"""Rows that a mask can cover: two words of 64 bits."""


def attend_reference(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in plain torch, computed in fp32."""
    results = [_attend_slowly(q[b], k, v, span, b, scale) for b in range(q.shape[0])]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def _attend_slowly(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, _ = q.shape
    rows = slice(span.starts[b], span.starts[b] + span.lengths[b])
    if span.lengths[b] == 0:
        return torch.zeros_like(q), torch.full((num_queries, num_heads), float("-inf"), device=q.device)
    group = num_heads // k.shape[0]
    keys = k[:, rows].float().repeat_interleave(group, dim=0)
    values = v[:, rows].float().repeat_interleave(group, dim=0)
    scores = torch.einsum("thd,hsd->hts", q.float(), keys) * scale
    if span.causal:
        own = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).tril()
        scores += additive(own, keys.shape[1], scores.dtype)
    elif (bias := span.bias(b, scores.dtype, q.device)) is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,hsd->thd", (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0), values)
    return out.to(q.dtype), lse.T


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask [B, T, M] bool, M at most 128, into bits [B, T, 2] int64.

    Bit i % 64 of word i // 64 says whether row i is visible; bits from M on are 0.
    """
    padded = torch.nn.functional.pad(mask, (0, MAX_MASKED - mask.shape[2])).unflatten(2, (2, 64))
    return (padded.long() << torch.arange(64, device=mask.device)).sum(-1)


def unpack_mask(bits: Tensor, num_masked: int) -> Tensor:
    """Unpack bits [B, T, 2] int64 into a mask [B, T, M] bool."""
    words = bits.unsqueeze(-1) >> torch.arange(64, device=bits.device)
    return (words & 1).bool().flatten(2)[..., :num_masked]


def masked_rows(span: KeySpan, q: Tensor) -> tuple[Tensor, int]:
    """Return who of the queries q [B, T, H, D] sees the span's last M rows, as bits [B, T, 2], and M.

    Made once per forward. A span without mask has no such rows.
    """
    batch, num_queries = q.shape[:2]
    if "visible" not in span.made:
        mask = span.mask
        if mask is None:
            own = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).tril()
            mask = own.expand(batch, -1, -1)
        span.made["visible"] = pack_mask(mask.to(q.device))
    if span.causal:
        return span.made["visible"], num_queries
    return span.made["visible"], 0 if span.mask is None else span.mask.shape[2]


def attend_tree_reference(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, visible: Tensor, num_masked: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with q [B, T, H, D] to rows of k, v [K, R, D], computed in fp32.

    Sequence b has `lengths[b]` rows from `starts[b]` on ([B] int32 or int64). The last M = `num_masked` of them, at
    most 128, are visible to query t as the bits `visible[b, t]` say ([B, T, 2] int64, see `pack_mask`); all earlier
    ones are visible. M may exceed a length: bits of rows before the start do not count.

    Returns out [B, T, H, D] in q's dtype and lse [B, T, H] fp32; out is 0 and lse -inf where no row is visible.
    """
    mask = unpack_mask(visible, num_masked) if num_masked else None
    return attend_reference(q, k, v, KeySpan([*map(int, starts)], [*map(int, lengths)], mask), scale)


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

    Keys and values are written to the `rows` [R] int64 of keys and values [K, S, D]. cos and sin are [R, D], the first
    half of the sines negative; `norms`, if there are any, come before RoPE. D is even.
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
    """Apply RoPE to heads [R, h, D] in fp32 with cosines and signed sines [R, D]."""
    low, high = heads.chunk(2, -1)
    return heads * cos.float().unsqueeze(1) + torch.cat([high, low], -1) * sin.float().unsqueeze(1)


REFERENCE = LayerKernels(add_norm_reference, rotate_heads_reference, gate_reference)
