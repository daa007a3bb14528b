"""Attention in plain torch: slow, obviously right, the specification of every other backend.

Shapes: `B` sequences, `T` queries, `S` keys, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specextend.attention.plan import KeySpan, additive


def attend(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with q [B, T, H, D] to the span's rows of k, v [R, K, D], computed in fp32.

    Returns out [B, T, H, D] in q's dtype and lse [B, T, H] fp32 (natural log), -inf where a span is empty.
    """
    results = [_attend_one(q[b], k, v, span, b, scale) for b in range(q.shape[0])]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def _attend_one(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, _ = q.shape
    rows = slice(span.starts[b], span.starts[b] + span.lengths[b])
    if span.lengths[b] == 0:
        return torch.zeros_like(q), torch.full((num_queries, num_heads), float("-inf"), device=q.device)
    group = num_heads // k.shape[1]
    keys = k[rows].float().repeat_interleave(group, dim=1)
    values = v[rows].float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * scale
    if span.causal:
        own = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).tril()
        scores += additive(own, len(keys), scores.dtype)
    elif (bias := span.bias(b, scores.dtype, q.device)) is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,shd->thd", (scores - lse.unsqueeze(-1)).exp(), values)
    return out.to(q.dtype), lse.T
