"""The flash-attn package, version 2 or 3: prefixes and causal chunks of a whole batch in one call, on a GPU.

It is imported only where it is chosen. It takes no tree mask and no float32; another kernel, which the caller names,
attends to those calls.

Shapes: `B` sequences, `T` queries, `S` keys of all sequences, `R` cache rows, `H` query heads, `K` key heads, `D` head
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plan import Attend, KeySpan

FlashKernel = Callable[..., Any]
"""`flash_attn_varlen_func` of either version: queries [B * T, H, D], keys and values [S, K, D], and where each sequence
ends; with `return_attn_probs` it returns out [B * T, H, D], lse [H, B * T], and in version 2 one thing more."""


def find_flash_attn() -> FlashKernel | None:
    """Import the kernel of flash-attn, version 3 if both are installed; return None if none can be imported."""
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError:
            return None
    kernel: FlashKernel = flash_attn_varlen_func
    return kernel


def attend_with(kernel: FlashKernel, otherwise: Attend) -> Attend:
    """Return a backend that attends with flash-attn's kernel, and with `otherwise` to calls that it does not take."""

    def flash(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        if span.mask is not None or 0 in span.lengths or q.dtype == torch.float32:
            return otherwise(q, k, v, span, scale)
        batch, num_queries = q.shape[:2]
        if "ends" not in span.made:  # once a forward, for all layers
            ends = [[n * num_queries for n in range(batch + 1)], [0, *span.lengths]]
            span.made["ends"] = torch.tensor(ends, dtype=torch.int32).to(q.device)
            span.made["ends"][1] = span.made["ends"][1].cumsum(0)
        ends_q, ends_k = span.made["ends"]
        out, lse, *_ = kernel(
            q.flatten(0, 1), _rows(k, span), _rows(v, span), ends_q, ends_k, num_queries, max(span.lengths),
            softmax_scale=scale, causal=span.causal, return_attn_probs=True,
        )  # fmt: skip
        return out.view(q.shape), lse.T.reshape(batch, num_queries, -1)

    return flash


def _rows(stored: Tensor, span: KeySpan) -> Tensor:
    """Return the span's rows of stored [K, R, D] as [S, K, D]; those of one sequence without a copy."""
    parts = [stored[:, s : s + n].transpose(0, 1) for s, n in zip(span.starts, span.lengths, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
