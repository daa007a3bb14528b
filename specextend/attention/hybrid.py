"""One forward's attention: a kernel call a span, merged (METHOD: Hybrid Tree Attention)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specextend.attention import flash, reference, sdpa
from specextend.attention.merge import merge_states
from specextend.attention.plan import AttentionPlan, KeySpan

Attend = Callable[[Tensor, Tensor, Tensor, KeySpan, float], tuple[Tensor, Tensor]]


def load_backend(name: str, device: torch.device) -> Attend:
    """The backend called `name`; `auto` is the fastest that is proven on the device.

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
    """Attention of q [B, T, H, D] over the rows of k, v [R, K, D] that the plan names. Returns [B, T, H, D]."""
    out, lse = attend(q, k, v, plan.spans[0], scale)
    for span in plan.spans[1:]:
        out = merge_states(out, lse, *attend(q, k, v, span, scale))
    return out
