"""Attention on the flash-attn package (the `flash` extra), imported only when it is chosen.

flash-attn has no tree mask, so masked spans go to torch's kernels; it serves prefixes and causal chunks, which hold
nearly all keys, for the whole batch at once.

Shapes: `B` sequences, `T` queries, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specextend.attention import sdpa
from specextend.attention.plan import KeySpan


def load() -> Any:
    """Return the package's function.

    Raises:
        ValueError: flash-attn is not installed.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ValueError("attention.backend flash needs the flash extra: pip install 'specextend[flash]'") from error
    return flash_attn_varlen_func


def attend(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with q [B, T, H, D] to the span's rows of k, v [R, K, D].

    Returns out [B, T, H, D] in q's dtype and lse [B, T, H] fp32 (natural log), -inf where a span is empty.
    """
    if span.mask is not None or 0 in span.lengths:
        return sdpa.attend(q, k, v, span, scale)
    batch, num_queries, num_heads, head_dim = q.shape
    keys, values = (torch.cat([x[s : s + n] for s, n in zip(span.starts, span.lengths, strict=True)]) for x in (k, v))
    ends_q = torch.arange(0, (batch + 1) * num_queries, num_queries, dtype=torch.int32, device=q.device)
    ends_k = torch.tensor([0, *span.lengths], device=q.device).cumsum(0).int()
    out, lse, _ = load()(
        q.reshape(-1, num_heads, head_dim), keys, values, ends_q, ends_k, num_queries, max(span.lengths),
        softmax_scale=scale, causal=span.causal, return_attn_probs=True,
    )  # fmt: skip
    return out.view(q.shape), lse.T.reshape(batch, num_queries, num_heads)
