"""Triton kernels: hybrid tree attention, and the functions between a layer's matrix products.

Attention to prefix and tree of all sequences is a single call. Queries of all heads with the same
key head are *rows* of one matrix product: row r is query r // G in head r % G. The keys of a
sequence are divided into splits, merged by a second kernel. Only blocks that reach past the prefix
look at masks. `plain.py` is the specification; `torch_kernels.TORCH` is that of a layer's
functions.

Places and masks are read on the device, and the grid depends only on shapes. So a captured CUDA
graph stays valid while sequences grow. Import this module only where triton is installed.

More shapes: `S` splits.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from specextend.attention.plain import (
    LEAST_ROWS,
    MAX_MASKED,
    MAX_QUERIES,
    HeadNorms,
    LayerKernels,
    masked_rows,
)
from specextend.attention.plan import KeySpan

HEAD_DIMS = (64, 128)
MAX_SPLITS = 64
WAVE_SLACK = 1.05
"""Time that a number of splits may take, relative to the best; fewer splits leave less to merge."""
MERGED_PARTS = 64
LOG2_E = 1 / math.log(2)
LN_2 = tl.constexpr(math.log(2))


class Tiles(NamedTuple):
    """The work of a program, and its threads."""

    rows: int
    keys: int
    """Keys of a block; at most 64, the bits of a word."""
    num_warps: int
    num_stages: int
    """Blocks of keys in shared memory at a time."""


def choose_tiles(head_dim: int, num_rows: int, dtype: torch.dtype) -> Tiles:
    """Choose the largest tiles that registers allow for `num_rows` = T * G rows."""
    if dtype == torch.float32:  # tensor cores would round it
        return Tiles(16, 32, 4, 1)
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    keys = 64 if head_dim == 64 or rows < 64 else 32  # more spill on an A100
    return Tiles(rows, keys, 8 if rows == 128 else 4, 3)


def choose_num_splits(num_programs: int, num_processors: int, num_warps: int) -> int:
    """Choose the fewest splits that keep a GPU busy, where programs run in waves.

    `num_programs` are those without splits, `num_processors` the GPU's multiprocessors.
    """
    resident = 2 if num_warps <= 4 else 1  # programs that a multiprocessor has registers for

    def time(num_splits: int) -> float:  # in waves of programs that attend to all keys
        return math.ceil(num_programs * num_splits / (resident * num_processors)) / num_splits

    nearly_best = WAVE_SLACK * min(map(time, range(1, MAX_SPLITS + 1)))
    return next(
        num_splits for num_splits in range(1, MAX_SPLITS + 1) if time(num_splits) <= nearly_best
    )


@triton.jit
def _window(words, is_row, first, num_words):
    """Load 64 bits of each row's words from bit `first` >= -64 on; bits before 0 are 1."""
    word = tl.full(is_row.shape, (first + 64) // 64 - 1, tl.int32)
    here = tl.load(words + word, mask=is_row & (word >= 0), other=-1).to(tl.uint64, bitcast=True)
    behind = tl.load(words + word + 1, mask=is_row & (word + 1 < num_words), other=0).to(
        tl.uint64, bitcast=True
    )
    shift = (first & 63).to(tl.uint64)
    return (here >> shift) | ((behind << 1) << (63 - shift))


@triton.jit
def _hide(scores, words, is_row, block, tail, length, num_words, KEYS: tl.constexpr):
    """Set hidden scores to -inf. Masked rows reach from `tail` to `length`."""
    column = tl.arange(0, KEYS)
    seen = (_window(words, is_row, block - tail, num_words)[:, None] >> column[None, :]) & 1
    exists = block + column < length
    return tl.where((seen != 0) & exists[None, :], scores, float("-inf"))


@triton.jit
def _added(scores, value, sums, total, top):
    higher = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing yet
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
    return sums, total, higher


@triton.jit(
    do_not_specialize=[
        "starts",
        "lengths",
        "num_queries",
        "num_key_heads",
        "num_masked",
        "num_splits",
    ]
)
def attend_splits(
    q, k, v, starts, lengths, visible, part_out, part_lse,
    q_sequence, q_token, q_head, k_head, k_row, v_head, v_row,
    num_queries, num_key_heads, num_masked, num_splits, log2_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of rows to a split of the keys. The grid is [row tiles, S, B * K].

    Writes part_out [B, T, H, S, D] and part_lse [B, T, H, S] to base 2, in fp32.
    """
    split = tl.program_id(1)
    b = tl.program_id(2) // num_key_heads
    key_head = tl.program_id(2) % num_key_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_queries * GROUP
    token = b * num_queries + rows // GROUP
    head = key_head * GROUP + rows % GROUP
    place = (token.to(tl.int64) * num_key_heads * GROUP + head) * num_splits + split

    length = tl.load(lengths + b).to(tl.int32)
    num_keys = tl.cdiv(tl.cdiv(length, KEYS), num_splits) * KEYS
    first = tl.minimum(split * num_keys, length)
    last = tl.minimum(first + num_keys, length)
    if first == last:
        tl.store(part_lse + place, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)
        return

    dims = tl.arange(0, HEAD_DIM)
    offsets = b.to(tl.int64) * q_sequence + (rows // GROUP) * q_token + head * q_head
    query = tl.load(q + offsets[:, None] + dims[None, :], mask=is_row[:, None], other=0.0)
    start = tl.load(starts + b).to(tl.int64)
    k += key_head.to(tl.int64) * k_head + start * k_row
    v += key_head.to(tl.int64) * v_head + start * v_row

    sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    tail = length - num_masked
    num_words = tl.cdiv(num_masked, 64)
    for block in tl.range(first, last, KEYS):
        keys = block + tl.arange(0, KEYS)
        exists = keys < length
        key = tl.load(k + keys[None, :] * k_row + dims[:, None], mask=exists[None, :], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * log2_scale
        if block + KEYS > tail:
            words = visible + num_words * token
            scores = _hide(scores, words, is_row, block, tail, length, num_words, KEYS)
        value = tl.load(v + keys[:, None] * v_row + dims[None, :], mask=exists[:, None], other=0.0)
        sums, total, top = _added(scores, value, sums, total, top)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(part_lse + place, top + tl.log2(total), mask=is_row)
    tl.store(
        part_out + place[:, None] * HEAD_DIM + dims[None, :],
        sums / total[:, None],
        mask=is_row[:, None],
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_splits(
    part_out, part_lse, out, lse, num_rows, num_splits,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a tile of rows, out of B * T * H. PADDED is a power of two >= the
    splits.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    splits = tl.arange(0, PADDED)
    dims = tl.arange(0, HEAD_DIM)
    is_row = rows < num_rows
    parts = rows[:, None] * num_splits + splits[None, :]
    part = tl.load(
        part_lse + parts, mask=is_row[:, None] & (splits < num_splits)[None, :], other=float("-inf")
    )
    top = tl.max(part, 1)
    weights = tl.exp2(part - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    total = tl.where(total == 0.0, 1.0, total)
    written = (part > float("-inf"))[:, :, None]
    each = tl.load(
        part_out + parts[:, :, None] * HEAD_DIM + dims[None, None, :], mask=written, other=0.0
    )
    merged = tl.sum(each * weights[:, :, None], 1) / total[:, None]
    where = rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + where, merged.to(out.dtype.element_ty), mask=is_row[:, None])
    tl.store(lse + rows, (top + tl.log2(total)) * LN_2, mask=is_row)


def attend_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    visible: Tensor,
    num_masked: int,
    scale: float,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Attend with q [B, T, H, D] to rows of k, v [K, R, D]; all tensors are on one device.

    Args:
        starts: First row of each sequence [B], contiguous.
        lengths: Rows of each sequence [B], contiguous.
        visible: Bits [B, T, M / 64] of the last M rows, see `pack_mask`.
        num_masked: M, which may exceed a length.
        num_splits: Splits of keys.

    Returns:
        out [B, T, H, D] in q's dtype and lse [B, T, H] fp32; 0 and -inf where no row is visible.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    group = num_heads // len(k)
    assert q.stride(3) == k.stride(2) == v.stride(2) == 1
    assert visible.is_contiguous()
    tiles = choose_tiles(head_dim, num_queries * group, q.dtype)
    part_out = torch.empty(*q.shape[:3], num_splits, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(*q.shape[:3], num_splits, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    attend_splits[triton.cdiv(num_queries * group, tiles.rows), num_splits, batch * len(k)](
        q, k, v, starts, lengths, visible, part_out, part_lse,
        *q.stride()[:3], *k.stride()[:2], *v.stride()[:2],
        num_queries, len(k), num_masked, num_splits, scale * LOG2_E,
        GROUP=group, HEAD_DIM=head_dim, ROWS=tiles.rows, KEYS=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    padded = triton.next_power_of_2(num_splits)
    rows = max(1, MERGED_PARTS // padded)
    merge_splits[(triton.cdiv(lse.numel(), rows),)](
        part_out,
        part_lse,
        out,
        lse,
        lse.numel(),
        num_splits,
        HEAD_DIM=head_dim,
        PADDED=padded,
        ROWS=rows,
    )
    return out, lse


def is_interpreted() -> bool:
    """Return True if TRITON_INTERPRET=1 was set at import, so kernels run slowly on a CPU."""
    return not isinstance(attend_splits, triton.JITFunction)


def serves(q: Tensor, span: KeySpan) -> bool:
    """Return True if the kernel takes a call.

    The interpreter gets bf16 wrong, because it multiplies its bits as integers.
    """
    num_masked = 0 if span.mask is None else span.mask.shape[2]
    fits = (
        span.window is None
        and q.shape[1] <= MAX_QUERIES
        and num_masked <= MAX_MASKED
        and q.shape[3] in HEAD_DIMS
    )
    return fits and not (is_interpreted() and q.dtype == torch.bfloat16)


def attend_triton(
    q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by a single call. Places and mask are made once per forward."""
    starts, lengths = span.places(q.device)
    visible, num_masked = masked_rows(span, q)
    num_splits = _num_splits(q.shape, len(k), q.dtype, q.device)
    return attend_tree(q, k, v, starts, lengths, visible, num_masked, scale, num_splits)


@cache
def _num_splits(
    shape: torch.Size, num_key_heads: int, dtype: torch.dtype, device: torch.device
) -> int:
    batch, num_queries, num_heads, head_dim = shape
    num_rows = num_queries * num_heads // num_key_heads
    tiles = choose_tiles(head_dim, num_rows, dtype)
    num_programs = batch * num_key_heads * triton.cdiv(num_rows, tiles.rows)
    is_gpu = device.type == "cuda"  # the interpreter on a CPU has enough for some splits
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 4
    return choose_num_splits(num_programs, num_processors, tiles.num_warps)


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
