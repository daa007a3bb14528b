"""Hybrid tree attention (arXiv 2505.20776, section 3): a kernel call for each span of keys, and their merge."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specextend.attention import flash, reference, sdpa
from specextend.attention.plan import AttentionPlan, KeySpan

Attend = Callable[[Tensor, Tensor, Tensor, KeySpan, float], tuple[Tensor, Tensor]]


def load_backend(name: str, device: torch.device) -> Attend:
    """Return the backend called `name`; `auto` is the fastest that is proven on the device.

    Raises:
        ValueError: no such backend, or its package is not installed.
    """
    if name == "auto":
        name = "sdpa" if device.type == "cpu" else "reference"
    if name == "flash":
        flash.load()
    backends: dict[str, Attend] = {"reference": reference.attend, "sdpa": sdpa.attend, "flash": flash.attend}
    if name not in backends:
        raise ValueError(f"attention.backend must be one of auto, {', '.join(backends)}, got {name!r}")
    return backends[name]


def attend_plan(attend: Attend, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attend with q [B, T, H, D] to the rows of k, v [R, K, D] that the plan names. Returns [B, T, H, D]."""
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
