"""Hybrid attention (arXiv 2505.20776, section 3): a kernel call for each span of keys, and their merge."""

from __future__ import annotations

import torch
from torch import Tensor

from specextend.attention.plan import Attend, AttentionPlan, KeySpan


def attend_plan(attend: Attend, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attend with q [B, T, H, D] to the rows of k, v [K, R, D] that the plan names. Returns [B, T, H, D]."""
    out, lse = attend(q, k, v, plan.spans[0], scale)
    for span in plan.spans[1:]:
        out = merge_states(out, lse, *attend(q, k, v, span, scale))
    return out


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Merge the results of attention over two disjoint key sets. out [..., D], lse [...] fp32.

    An empty set has lse -inf and any finite out; at most one of the two is empty.
    """
    weight_a = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)
    return torch.lerp(out_b.float(), out_a.float(), weight_a).to(out_a.dtype)


def has_prefix(span: KeySpan, num_queries: int) -> bool:
    """Return True if the span is causal and holds rows before the queries' own."""
    return span.causal and any(length > num_queries for length in span.lengths)


def attend_chunk(attend: Attend, q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to a causal span with a prefix by a kernel that takes none: prefix and own rows apart, then merged."""
    num_queries = q.shape[1]
    before = [length - num_queries for length in span.lengths]
    own = [start + length for start, length in zip(span.starts, before, strict=True)]
    prefix = attend(q, k, v, KeySpan(span.starts, before), scale)
    chunk = attend(q, k, v, KeySpan(own, [num_queries] * len(own), causal=True), scale)
    return merge_states(*prefix, *chunk), torch.logaddexp(prefix[1], chunk[1])
