"""The functions between a layer's matrix products as Triton kernels: each reads and writes its rows
once.

`torch_kernels.TORCH` is the specification. Captured CUDA graphs stay valid while sequences grow.
Import this module only where triton is installed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from specextend.attention.plain import LEAST_ROWS, HeadNorms, LayerKernels

HEADS = 8
TINIEST = tl.constexpr(1e-12)
"""Smallest scale of a row, for rows of zeros."""
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""Value to which the largest element of a row is scaled."""
GATED = 1024


def norm_warps(hidden_size: int) -> int:
    """Choose the warps that normalise a row: up to 16 elements a thread, then more."""
    return max(1, min(16, triton.next_power_of_2(hidden_size) // 512))


@triton.jit
def add_norm_rows(
    x, delta, weight, total, normed, size, eps, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr
):
    """Add and normalise a row of `size` elements. The grid is [R]; BLOCK is a power of two >=
    size.
    """
    start = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    exists = column < size
    row = tl.load(x + start + column, mask=exists, other=0.0).to(tl.float32)
    if HAS_DELTA:
        row += tl.load(delta + start + column, mask=exists, other=0.0).to(tl.float32)
        added = row.to(total.dtype.element_ty)
        tl.store(total + start + column, added, mask=exists)
        row = added.to(tl.float32)  # the norm sees what later layers see
    scale = tl.rsqrt(tl.sum(row * row, 0) / size + eps)
    row = row * scale * tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(normed + start + column, row.to(normed.dtype.element_ty), mask=exists)


@triton.jit
def _load_halves(place, mask, half):
    return tl.load(place, mask=mask, other=0.0), tl.load(place + half, mask=mask, other=0.0)


@triton.jit
def _store_halves(place, low, high, mask, half):
    tl.store(place, low, mask=mask)
    tl.store(place + half, high, mask=mask)


@triton.jit
def _normed(low, high, query_weight, key_weight, is_query, dims, in_half, DIM: tl.constexpr, eps):
    scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / DIM + eps)[:, None]
    query_low, query_high = _load_halves(query_weight + dims, in_half, DIM // 2)
    key_low, key_high = _load_halves(key_weight + dims, in_half, DIM // 2)
    low *= scale * tl.where(is_query, query_low, key_low).to(tl.float32)
    high *= scale * tl.where(is_query, query_high, key_high).to(tl.float32)
    return low, high


@triton.jit
def rotate_rows(
    qkv, cos, sin, query_weight, key_weight, query, keys, values, rows, k_head, k_row, v_head,
    v_row, eps,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Rotate GROUP heads of a token, or copy them to the cache. HALF is a power of two >= DIM / 2.

    The grid is [R, groups of H + 2K heads].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    dims = tl.arange(0, HALF)
    in_half = dims < DIM // 2
    first_value = NUM_HEADS + NUM_KEY_HEADS
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < first_value)
    is_value = (head >= first_value) & (head < first_value + NUM_KEY_HEADS)

    places = (token * (first_value + NUM_KEY_HEADS) + head)[:, None] * DIM + dims[None, :]
    exists = (head < first_value + NUM_KEY_HEADS)[:, None] & in_half[None, :]
    stored_low, stored_high = _load_halves(qkv + places, exists, DIM // 2)
    low = stored_low.to(tl.float32)
    high = stored_high.to(tl.float32)
    if HAS_NORMS:
        low, high = _normed(
            low, high, query_weight, key_weight, is_query[:, None], dims[None, :],
            in_half[None, :], DIM, eps,
        )  # fmt: skip
    angles = (token * DIM + dims)[None, :]
    cos_low, cos_high = _load_halves(cos + angles, in_half[None, :], DIM // 2)
    sin_low, sin_high = _load_halves(sin + angles, in_half[None, :], DIM // 2)
    turned_low = low * cos_low.to(tl.float32) + high * sin_low.to(tl.float32)
    turned_high = high * cos_high.to(tl.float32) + low * sin_high.to(tl.float32)
    turned_low = turned_low.to(query.dtype.element_ty)
    turned_high = turned_high.to(query.dtype.element_ty)

    row = tl.load(rows + token).to(tl.int64)
    out = query + (token * NUM_HEADS + head)[:, None] * DIM + dims[None, :]
    is_written = is_query[:, None] & in_half[None, :]
    _store_halves(out, turned_low, turned_high, is_written, DIM // 2)
    key = keys + row * k_row + (head - NUM_HEADS).to(tl.int64)[:, None] * k_head + dims[None, :]
    is_written = is_key[:, None] & in_half[None, :]
    _store_halves(key, turned_low, turned_high, is_written, DIM // 2)
    value = (
        values + row * v_row + (head - first_value).to(tl.int64)[:, None] * v_head + dims[None, :]
    )
    is_written = is_value[:, None] & in_half[None, :]
    _store_halves(value, stored_low, stored_high, is_written, DIM // 2)


@triton.jit
def gate_rows(gate_up, out, size, BLOCK: tl.constexpr):
    """Gate BLOCK elements of a row of `size`. The grid is [R, blocks of a row]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    gate = tl.load(gate_up + 2 * row * size + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * size + column, mask=exists, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + column, gated.to(out.dtype.element_ty), mask=exists)


@triton.jit
def quantize_rows(x, rounded, scales, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Round a row of `size` elements to fp8 or int8, scaled by its largest. The grid is [R]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < size
    values = tl.load(x + row * size + column, mask=exists, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), TINIEST) / LARGEST
    is_nan = tl.max((values != values).to(tl.int32), 0)  # which a maximum passes over
    scale = tl.where(is_nan > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    values = values / scale
    if LARGEST == 127:  # to an integer, before it is cut to one
        values = values + 12582912.0 - 12582912.0
    tl.store(rounded + row * size + column, values.to(rounded.dtype.element_ty), mask=exists)


@triton.jit
def scale_rows(
    sums, row_scales, scales, bias, out, size, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Multiply integer sums by the scales of their row and output. The grid is [R, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    values = tl.load(sums + row * size + column, mask=exists, other=0).to(tl.float32)
    values *= tl.load(row_scales + row) * tl.load(scales + column, mask=exists, other=0.0)
    if HAS_BIAS:
        values += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, values.to(out.dtype.element_ty), mask=exists)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `torch_kernels.add_norm`."""
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    size = x.shape[1]
    add_norm_rows[(len(x),)](
        x, x if delta is None else delta, weight, total, normed, size, eps,
        BLOCK=triton.next_power_of_2(size), HAS_DELTA=delta is not None, num_warps=norm_warps(size),
    )  # fmt: skip
    return total, normed


def rotate_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
) -> Tensor:
    """See `torch_kernels.rotate_heads`; `rows` are not read on the host."""
    assert all(x.is_contiguous() for x in (qkv, cos, sin, rows))
    assert keys.stride(2) == values.stride(2) == 1
    num_tokens, num_all, head_dim = qkv.shape
    num_heads = num_all - 2 * len(keys)
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    query_weight, key_weight, eps = (
        (cos, cos, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    )
    rotate_rows[num_tokens, triton.cdiv(num_all, HEADS)](
        qkv, cos, sin, query_weight, key_weight, query, keys, values, rows,
        *keys.stride()[:2], *values.stride()[:2], eps,
        NUM_HEADS=num_heads, NUM_KEY_HEADS=len(keys), DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        GROUP=HEADS, HAS_NORMS=norms is not None, num_warps=1,
    )  # fmt: skip
    return query


def gate(gate_up: Tensor) -> Tensor:
    """See `torch_kernels.gate`."""
    assert gate_up.is_contiguous()
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), size)
    gate_rows[len(gate_up), triton.cdiv(size, GATED)](gate_up, out, size, BLOCK=GATED, num_warps=4)
    return out


def multiply(linear: nn.Module, x: Tensor) -> Tensor:
    """See `torch_kernels.multiply`.

    In 8 bits, torch's operators would read and write rows several times, half as long as the
    product.
    """
    weight: Any = linear.weight
    values = getattr(weight, "qdata", weight)
    if values.dtype not in LARGEST or x.dtype == torch.float32:
        product: Tensor = linear(x)
        return product
    assert x.is_contiguous()
    size = x.shape[1]
    num_rows = max(len(x), LEAST_ROWS)
    rounded = x.new_empty(num_rows, size, dtype=values.dtype)
    scales = x.new_empty(num_rows, 1, dtype=torch.float32)
    quantize_rows[(len(x),)](
        x, rounded, scales, size, LARGEST=LARGEST[values.dtype],
        BLOCK=triton.next_power_of_2(size), num_warps=norm_warps(size),
    )  # fmt: skip
    bias: Any = linear.bias
    if values.dtype != torch.int8:
        return torch._scaled_mm(
            rounded[: len(x)], values.t(), scales[: len(x)], weight.scale.t(), bias,
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
    sums = torch._int_mm(rounded, values.t())
    out = x.new_empty(len(x), len(values))
    scale: Any = linear.scale
    scale_rows[len(x), triton.cdiv(len(values), GATED)](
        sums, scales, scale, scale if bias is None else bias, out, len(values),
        BLOCK=GATED, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out


TRITON = LayerKernels(add_norm, rotate_heads, gate, multiply)
