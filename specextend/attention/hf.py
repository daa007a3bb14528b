"""The hook into transformers: stock models run on our kernels and our cache.

A forward passes `plan=` and `attend=`, which reach the attention function of every layer. It also passes a `CacheHook`
as `past_key_values`, which gives that function the layer's whole cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specextend.attention.hybrid import attend_plan
from specextend.attention.plan import Attend, AttentionPlan

IMPLEMENTATION = "specextend"


def plan_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    plan: AttentionPlan,
    attend: Attend,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with query [B, H, T, D] to the layer's whole cache key, value [K, R, D]. Returns [B, T, H, D]."""
    q = query.transpose(1, 2)
    if module.layer_idx in plan.keep_layers:
        plan.queries[int(module.layer_idx)] = q  # type: ignore[arg-type]
    return attend_plan(attend, q, key, value, plan, scaling), None


AttentionInterface.register(IMPLEMENTATION, plan_attention)
