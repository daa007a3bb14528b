"""Hybrid tree attention (arXiv 2505.20776, section 3): a kernel call for each span of keys, and their merge."""

from __future__ import annotations

import torch
from torch import Tensor

from specextend.attention.plan import Attend, AttentionPlan


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
