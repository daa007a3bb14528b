"""The attention backends: three functions with one signature, `Attend`, and the choice between them.

`attend_reference` is the specification: plain torch, slow, obviously right. Every other backend must equal it.

Shapes: `B` sequences, `T` queries, `S` keys, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plan import KeySpan, additive

Attend = Callable[[Tensor, Tensor, Tensor, KeySpan, float], tuple[Tensor, Tensor]]
"""(q [B, T, H, D], k [K, R, D], v [K, R, D], span, scale) -> out [B, T, H, D] in q's dtype, lse [B, T, H] fp32.

Each sequence attends to the span's rows of k and v. lse is the natural logarithm of the sum of exponentials, -inf where
a span is empty; out is finite there."""

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention.default

_LEAST_ROWS = 64
"""Queries and keys from which the CPU kernel lays keys out for the matrix units; below, some runs are half as fast."""


def load_backend(name: str, device: torch.device) -> Attend:
    """Return the backend called `name`; `auto` is the fastest that is proven on the device.

    Raises:
        ValueError: no such backend, or its package is not installed.
    """
    if name == "auto":
        name = "sdpa" if device.type == "cpu" else "reference"
    backends: dict[str, Attend] = {"reference": attend_reference, "sdpa": attend_sdpa, "flash": attend_flash}
    if name not in backends:
        raise ValueError(f"attention.backend must be one of auto, {', '.join(backends)}, got {name!r}")
    if name == "flash":
        _load_flash_attn()
    return backends[name]


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
    out = torch.einsum("hts,hsd->thd", (scores - lse.unsqueeze(-1)).exp(), values)
    return out.to(q.dtype), lse.T


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by torch's own flash kernels, which return the LSE and take grouped heads without copying K and V."""
    kernel = _attend_cpu if q.device.type == "cpu" else _attend_cuda
    results = [kernel(q[b : b + 1], k, v, span, b, scale) for b in range(q.shape[0])]
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _attend_cpu(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    length = span.lengths[b]
    if length == 0:  # the kernel divides by the number of keys
        return _nothing(q)
    rows = slice(span.starts[b], span.starts[b] + length)
    key, value = k[:, rows].unsqueeze(0), v[:, rows].unsqueeze(0)
    if span.causal or (q.shape[1] == 1 and span.mask is None):
        out, lse = _flash_cpu(q.transpose(1, 2), key, value, 0.0, span.causal, attn_mask=None, scale=scale)
        return out.transpose(1, 2), lse.transpose(1, 2)
    group = q.shape[2] // k.shape[0]
    num_rows = max(group * q.shape[1], _LEAST_ROWS if length >= _LEAST_ROWS else 0)
    bias = span.bias(b, q.dtype, q.device, group, num_rows)  # the kernel wants the query's dtype
    return _attend_folded(q, key, value, bias, num_rows, scale)


def _attend_folded(
    q: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, num_rows: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with a head group's queries as rows of one head, padded to `num_rows`, so that each key is read once.

    `bias` [num_rows, S] is the same for all heads.
    """
    _, num_queries, num_heads, head_dim = q.shape
    num_groups = key.shape[1]
    used = num_queries * num_heads // num_groups
    folded = q.new_zeros(1, num_groups, num_rows, head_dim)
    by_group = q.view(num_queries, num_groups, -1, head_dim).permute(1, 2, 0, 3)
    folded[0, :, :used] = by_group.reshape(num_groups, used, head_dim)
    mask = None if bias is None else bias[None, None]
    out, lse = _flash_cpu(folded, key, value, 0.0, False, attn_mask=mask, scale=scale)
    out = out[0, :, :used].reshape(num_heads, num_queries, head_dim).transpose(0, 1).unsqueeze(0)
    return out, lse[0, :, :used].reshape(num_heads, num_queries).T.unsqueeze(0)


def _attend_cuda(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by flash if there is no mask, by the memory-efficient kernel if there is; heads are repeated for both."""
    if span.lengths[b] == 0:
        return _nothing(q)
    rows = slice(span.starts[b], span.starts[b] + span.lengths[b])
    group = q.shape[2] // k.shape[0]
    query = q.transpose(1, 2)
    key, value = (x[:, rows].repeat_interleave(group, dim=0).unsqueeze(0) for x in (k, v))
    bias = span.bias(b, q.dtype, q.device)
    if bias is None and q.dtype != torch.float32:
        out, lse, *_ = _flash_cuda(query, key, value, 0.0, span.causal, False, scale=scale)
    else:
        padded = None if bias is None else _aligned(bias).expand(1, q.shape[2], -1, -1)
        out, lse, *_ = _efficient_cuda(query, key, value, padded, True, 0.0, span.causal, scale=scale)
    return out.transpose(1, 2), lse[..., : q.shape[1]].transpose(1, 2)


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), device=q.device)


def _aligned(bias: Tensor) -> Tensor:
    """Lay the bias [T, S] out in rows of a multiple of 16 elements, as the memory-efficient kernel requires."""
    padding = -bias.shape[1] % 16
    return torch.nn.functional.pad(bias, (0, padding))[:, : bias.shape[1]][None, None]


def attend_flash(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by the flash-attn package (the `flash` extra), for the whole batch at once.

    It has no tree mask, so masked spans go to torch's kernels; prefixes and causal chunks hold nearly all keys.
    """
    if span.mask is not None or 0 in span.lengths:
        return attend_sdpa(q, k, v, span, scale)
    batch, num_queries, num_heads, head_dim = q.shape
    parts = [slice(start, start + length) for start, length in zip(span.starts, span.lengths, strict=True)]
    keys, values = (torch.cat([x[:, part].transpose(0, 1) for part in parts]) for x in (k, v))
    ends_q = torch.arange(0, (batch + 1) * num_queries, num_queries, dtype=torch.int32, device=q.device)
    ends_k = torch.tensor([0, *span.lengths], device=q.device).cumsum(0).int()
    out, lse, _ = _load_flash_attn()(
        q.reshape(-1, num_heads, head_dim), keys, values, ends_q, ends_k, num_queries, max(span.lengths),
        softmax_scale=scale, causal=span.causal, return_attn_probs=True,
    )  # fmt: skip
    return out.view(q.shape), lse.T.reshape(batch, num_queries, num_heads)


def _load_flash_attn() -> Any:
    """Import the kernel of flash-attn, which is imported only if it is chosen.

    Raises:
        ValueError: flash-attn is not installed.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ValueError("attention.backend flash needs the flash extra: pip install 'specextend[flash]'") from error
    return flash_attn_varlen_func
