"""The flash-attn package, version 2 or 3: prefixes and causal chunks of a whole batch in one call, on a GPU.

It is imported only where it is chosen. It takes no tree mask and no float32; another kernel, which the caller names,
attends to those calls. Keys are never copied: one sequence is a slice of the cache, a batch is read in pages.

Shapes: `B` sequences, `T` queries, `S` keys, `R` cache rows, `P` rows of a page, `H` query heads, `K` key heads, `D`
head size.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plan import Attend, KeySpan

PAGE = 256
"""P, the smallest page that version 2 reads; the regions of a cache begin at multiples of it."""
FlashKernel = Callable[..., Any]
"""`flash_attn_with_kvcache` of either version: q [B, T, H, D], a cache [B, S, K, D] or pages [R / P, P, K, D] of one;
with `return_softmax_lse` the first two of its results are out [B, T, H, D] and lse [B, H, T]."""


def find_flash_attn() -> FlashKernel | None:
    """Import the kernel of flash-attn, version 3 if both are installed; return None if none can be imported."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError:
            return None
    kernel: FlashKernel = flash_attn_with_kvcache
    return kernel


def attend_with(kernel: FlashKernel, otherwise: Attend) -> Attend:
    """Return a backend that attends with flash-attn's kernel, and with `otherwise` to calls that it does not take."""
    table_name = "page_table" if "page_table" in signature(kernel).parameters else "block_table"

    def flash(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        if span.mask is not None or 0 in span.lengths or q.dtype == torch.float32:
            return otherwise(q, k, v, span, scale)
        if len(q) == 1:
            rows = slice(span.starts[0], span.starts[0] + span.lengths[0])
            keys, values = (stored[:, rows].transpose(0, 1).unsqueeze(0) for stored in (k, v))
            places = {}
        elif any(start % PAGE for start in span.starts) or k.shape[1] % PAGE:
            return otherwise(q, k, v, span, scale)
        else:
            keys, values = (stored.unflatten(1, (-1, PAGE)).permute(1, 2, 0, 3) for stored in (k, v))
            table, lengths = _pages(span, len(keys), q.device)
            places = {table_name: table, "cache_seqlens": lengths}
        out, lse, *_ = kernel(
            q, keys, values, softmax_scale=scale, causal=span.causal, return_softmax_lse=True, **places
        )
        return out, lse.transpose(1, 2)

    return flash


def _pages(span: KeySpan, num_pages: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the pages [B, S / P] and the number of rows [B] of each sequence, int32, made once a forward."""
    if "pages" not in span.made:
        starts, lengths = span.places(device)
        numbers = torch.arange(-(-max(span.lengths) // PAGE), device=device)
        pages = (starts // PAGE).unsqueeze(1) + numbers
        span.made["pages"] = pages.clamp(max=num_pages - 1).int()  # pages behind a shorter sequence are not read
        span.made["num_rows"] = lengths.int()
    return span.made["pages"], span.made["num_rows"]
