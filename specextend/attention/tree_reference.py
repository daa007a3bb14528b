"""Tree attention in plain torch: the specification of `tree_kernel.py`, slow and obviously right, on any device.

A batch's places in the cache and its masks are tensors here, so that a kernel can read them without the host.

Shapes: `B` sequences, `T` queries, `M` masked rows, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specextend.attention.plan import KeySpan

MAX_MASKED = 128
"""Rows that a mask can cover: two words of 64 bits."""


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
    mask = unpack_mask(visible, num_masked)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), device=q.device)
    for b in range(len(q)):
        start, length = int(starts[b]), int(lengths[b])
        keys, values = (x[:, start : start + length].float() for x in (k, v))
        seen = torch.ones(q.shape[1], length, dtype=torch.bool, device=q.device)
        num_tail = min(num_masked, length)
        seen[:, length - num_tail :] = mask[b, :, num_masked - num_tail :]
        for h in range(q.shape[2]):
            head = h * len(k) // q.shape[2]
            scores = (q[b, :, h].float() @ keys[head].T * scale).masked_fill(~seen, float("-inf"))
            lse[b, :, h] = scores.logsumexp(-1)
            out[b, :, h] = (scores.softmax(-1).nan_to_num(0.0) @ values[head]).to(q.dtype)
    return out, lse
