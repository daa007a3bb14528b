"""Attention on a CPU, compiled by numba: for few queries and for prefill chunks.

The queries of all heads that share a key head are *rows* of one matrix product, so a key is read once for all of them.
Work is divided into items: a sequence, a key head, up to `ROWS` rows and, where few rows would leave threads without
work, a split of `SPLIT` keys. The threads of torch's own pool take items in turn; `items` is what they do.

The result for a query is bitwise the same whatever other queries are in the call and however many threads there are.
That of a node of a tree is the one that its token would have behind its path alone: the mask says which rows those
are, parents first, and each query has a copy of the last blocks of keys, with its path in the places after the prefix.

numba is the extra `cpu`: import this module only where it is installed.

Shapes: `B` sequences, `T` queries, `M` masked keys, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core.errors import NumbaError
from torch import Tensor

from specextend.attention.compiled import vectors
from specextend.attention.compiled.blocks import HEADER
from specextend.attention.compiled.items import LAYOUT, SPLIT, divide, kernel, padded_rows
from specextend.attention.compiled.tiles import HAS_TILES
from specextend.attention.plan import KeySpan

ROWS = 192 if HAS_TILES else 96
"""Rows of an item at most; a multiple of TILE."""
ITEMS_PER_WORKER = 4
"""Items from which threads are busy evenly enough without dividing the keys."""

ELEMENTS: dict[torch.dtype, type] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint32 if vectors.HAS_BF16 else np.uint16,
}


def can_make(kernel: Callable[[], Any]) -> bool:
    """Compile a kernel, or read it from disk; return False if numba cannot make it for this processor."""
    try:
        kernel()
    except (NumbaError, OSError, RuntimeError):
        return False
    return True


def can_compile(dtype: torch.dtype) -> bool:
    """Return True if numba makes the kernel of `dtype`."""
    return can_make(partial(kernel, ELEMENTS[dtype]))


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend on the CPU with q [B, T, H, D] to the span's rows of k, v [K, R, D], which are heads first.

    Returns out [B, T, H, D] in q's dtype and lse [B, T, H] fp32. A query that sees no key gets out 0 and lse -inf. With
    `causal` the rows before the last T are visible to all queries, so a prefill chunk needs one call. It runs on as
    many threads as torch. The first call of a process reads the kernel from numba's cache on disk or compiles it, which
    takes seconds.
    """
    assert serves(q.shape[3], q.dtype)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(3) == k.stride(2) == v.stride(2) == 1
    num_sequences, num_queries, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float32) if span.needs_lse else None
    shares = share(num_sequences, k.shape[0], num_queries * num_heads // k.shape[0], max(span.lengths))
    counters = torch.zeros(2 + shares.num_groups, dtype=torch.int64)
    call = describe(q, k, v, out, lse, span, scale, shares)
    run_on(shares.num_workers, kernel(ELEMENTS[q.dtype]), LAYOUT.pack(*call, counters.data_ptr()))
    return out, q.new_empty(0) if lse is None else lse


def describe(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, span: KeySpan, scale: float, shares: Shares
) -> tuple[float, ...]:
    """Return the fields of a `KernelCall` but for its counters; tensors that it needs are kept in the span."""
    num_sequences, num_queries, num_heads, head_dim = q.shape
    places, mask = _places(span), _mask(span)
    window = max(span.lengths) if span.window is None else span.window
    causal, mask_width = span.causal or span.window is not None, 0 if mask is None else mask.shape[2]
    own = divide(head_dim, padded_rows(shares.rows), 0).end
    parts = shares.num_parts * padded_rows(shares.rows) * (HEADER + 4 * head_dim) if shares.num_parts > 1 else 0
    workspace = _workspace(span, shares.num_workers * own + shares.num_groups * parts)
    return (
        q.data_ptr(), *_strides(q), k.data_ptr(), *_strides(k), v.data_ptr(), *_strides(v),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(), places.data_ptr(),
        0 if mask is None else mask.data_ptr(), mask_width, causal, window,
        num_sequences, num_queries, k.shape[0], num_heads // k.shape[0], head_dim,
        shares.rows, shares.num_row_blocks, shares.num_splits, shares.num_parts,
        workspace, workspace + shares.num_workers * own, scale, scale / math.log(2),
    )  # fmt: skip


class Shares(NamedTuple):
    """Divides a call's work."""

    rows: int
    num_row_blocks: int
    num_splits: int
    num_parts: int
    num_groups: int
    """Items, parts aside."""
    num_workers: int


def share(num_sequences: int, num_key_heads: int, num_rows: int, num_keys: int) -> Shares:
    """Divide the rows of all key heads and, where threads would lack work otherwise, the longest sequence's keys."""
    rows = min(ROWS, num_rows)
    num_row_blocks = -(-num_rows // rows)
    num_groups = num_sequences * num_key_heads * num_row_blocks
    num_splits = max(1, -(-num_keys // SPLIT))
    threads = num_workers()
    enough = threads == 1 or num_groups >= ITEMS_PER_WORKER * threads
    return Shares(rows, num_row_blocks, num_splits, 1 if enough else num_splits, num_groups, threads)


def _strides(x: Tensor) -> list[int]:
    return [stride * x.element_size() for stride in x.stride()[:-1]]


def serves(head_dim: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel takes heads of `head_dim` elements of `dtype`."""
    return dtype in ELEMENTS and head_dim % (16 if dtype == torch.float32 else 32) == 0


def _places(span: KeySpan) -> Tensor:
    """Return, for each sequence, its first row, its number of rows and its first masked key: [3, B]."""
    if "places" not in span.made:
        num_masked = 0 if span.mask is None else span.mask.shape[2]
        first_masked = [max(0, length - num_masked) for length in span.lengths]
        span.made["places"] = torch.tensor([span.starts, span.lengths, first_masked])
    return span.made["places"]


def _mask(span: KeySpan) -> Tensor | None:
    """Return the mask of a tree [B, T, M], contiguous."""
    if span.mask is None or span.window is not None:
        return None
    if "mask" not in span.made:
        span.made["mask"] = span.mask.contiguous()
    return span.made["mask"]


def _workspace(span: KeySpan, num_bytes: int) -> int:
    """Return the address of memory that the layers of a forward use in turn."""
    span.made["workspace"] = torch.empty(num_bytes, dtype=torch.uint8)
    return span.made["workspace"].data_ptr()


@cache
def _thread_pool() -> Any:
    """Return `GOMP_parallel` of the OpenMP library that torch uses, or None: then one thread does all.

    A second pool, such as numba's own, would slow torch's down: idle threads spin for milliseconds.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None


def num_workers() -> int:
    """Return on how many threads `run_on` can run: as many as torch has."""
    return torch.get_num_threads() if _thread_pool() else 1


def run_on(num_threads: int, entry: Any, record: bytes | ctypes.c_void_p) -> None:
    """Call numba's `entry` with `record`, or its address, on each of `num_threads`, at most `num_workers()`."""
    if num_threads == 1:
        entry.ctypes(record)
    else:
        _thread_pool()(ctypes.c_void_p(entry.address), record, num_threads, 0)
