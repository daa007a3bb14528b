"""Products with the weight of a linear layer in bf16 or int8, compiled by numba for processors with
AVX2 or more.

The weight is laid out once, in blocks of `BLOCK` outputs whose inputs stand in pairs. An item of
work is a block of up to `ROWS` rows of x. They are multiplied with `DEPTH` pairs of inputs at a
time, a part of the weight that stays in a core's cache meanwhile, so few rows read the weight from
memory once. Sums are fp32. Numbers of int8 are read from memory as they are, and widened to bf16,
which holds them exactly, `WIDENED` pairs at a time; an output's scale is applied to its sum.
Without avx512_bf16 pairs are widened to fp32 in registers, and x before.

The result for a row is bitwise the same whatever other rows are in the call and however many
threads there are.

numba is the extra `cpu`: import this module only where it is installed.

Shapes: `T` rows, `I` inputs, `O` outputs.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from specextend.attention.compiled import tiles
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import TILE, copy_row, load_units
from specextend.attention.compiled.items import Matrix, Wide
from specextend.attention.compiled.items import multiply as multiply_tile
from specextend.attention.compiled.tiles import HAS_TILES
from specextend.attention.compiled.vectors import (
    FLOATS,
    HAS_BF16,
    LANES,
    UNITS,
    VECTOR_BYTES,
    address,
    emitted,
    load,
    nth,
    store,
)

VECTORS = 4
"""Vectors of outputs in a block."""
BLOCK = VECTORS * LANES
"""Outputs of a block."""
ROWS = 256 if HAS_TILES else 96
"""Rows of an item at most; a multiple of a tile's."""
DEPTH = 96 if HAS_TILES else 1024 if HAS_BF16 else 256
"""Pairs of inputs whose weights are read for all rows of an item before the next ones: what a
core's cache holds.
"""
WIDENED = 128
"""Pairs of inputs that are widened at once: 32 KiB of bf16."""
ELEMENT: Any = np.uint32 if HAS_BF16 else np.int32
_TILE = tiles.ROWS if HAS_TILES else TILE if HAS_BF16 else 5
"""Rows of a tile."""
_IN_COLUMNS = not HAS_BF16
"""Whether a block's vectors lie one behind the other, each with all pairs, because a tile has one
of them.
"""
PREFETCHED = 16
"""Tiles of rows with which the columns of the next product are asked for, a part with each."""
_WIDE = np.uint16(0)  # as an element: bf16 that is widened
MULTIPLE = 2 * tiles.PAIRS if HAS_TILES else 2 if HAS_BF16 else LANES
"""What the number of inputs is a multiple of."""
_SUM_BYTES = VECTORS * VECTOR_BYTES
_X_BYTES = 0 if HAS_BF16 else ROWS * DEPTH * 8
WORKER_BYTES = (2 * ROWS + WIDENED) * _SUM_BYTES + _X_BYTES
"""Memory of a worker: sums of ROWS rows and of another block, WIDENED pairs of weights, x in
fp32.
"""


class LinearCall(NamedTuple):
    """One call's tensors by address, and its sizes."""

    x: int
    weight: int
    is_int8: int
    scales: int
    bias: int
    """[O] fp32, as the scales."""
    out: int
    num_pairs: int
    """I / 2"""
    num_blocks: int
    residual: int
    """[T, O] that is added, in bf16; 0: nothing."""
    is_gated: int
    """1: the first half of the outputs is the gate of the second one, and SwiGLU of both is
    written.
    """


RECORD = np.dtype([*LinearCall.__annotations__.items()])


def emit_output(b, i, sums, scales, bias):
    """Emit a vector of a row's outputs: sums times their scales, with bias."""
    return vir.fma(
        b, *(load(b, address(b, each, i * VECTOR_BYTES)) for each in (sums, scales, bias))
    )


@emitted()
def write_sums(b, element, sums, scales, bias, residual, out):
    """Write a row's outputs of a block as bf16, with a residual unless its address is 0."""
    is_added = b.icmp_signed("!=", residual, vir.number(0))
    for i in range(VECTORS):
        offset = i * VECTOR_BYTES // 2
        added = load_units(b, types.uint16, address(b, b.select(is_added, residual, out), offset))
        added = b.bitcast(b.select(is_added, added, vir.units([0] * LANES)), FLOATS)
        value = b.fadd(emit_output(b, i, sums, scales, bias), added)
        store(b, vir.to_bf16(b, value), address(b, out, offset), 2)


@emitted()
def write_gated(
    b, element, gate, gate_scales, gate_bias, sums, scales, bias,
    out,
):  # fmt: skip
    """Write SwiGLU of a row's outputs of two blocks as bf16."""
    for i in range(VECTORS):
        value = b.fmul(
            vir.silu(b, emit_output(b, i, gate, gate_scales, gate_bias)),
            emit_output(b, i, sums, scales, bias),
        )
        store(b, vir.to_bf16(b, value), address(b, out, i * VECTOR_BYTES // 2), 2)


@emitted()
def widen(b, element, source, count, target):
    """Turn vectors of int8, 16 first and 16 second inputs of pairs, into vectors of pairs of
    bf16.
    """

    def body(i):
        place = nth(b, source, i, 2 * LANES)
        first, second = (
            b.bitcast(
                b.sitofp(
                    load(b, address(b, place, start), ir.VectorType(vir.I8, LANES), 1), FLOATS
                ),
                UNITS,
            )
            for start in (0, LANES)
        )
        # the lower half of such a float is 0
        pairs = b.or_(b.lshr(first, vir.units([16] * LANES)), second)
        store(b, pairs, nth(b, target, i))

    vir.repeat(b, count, body)


@numba.njit
def matrix_of(weight, start, num_pairs, size):
    """Return a block of a weight from a pair on, in vectors of `size` bytes."""
    if _IN_COLUMNS:
        return Wide(weight + start * size, size, num_pairs * size)
    return Wide(weight + start * VECTORS * size, VECTORS * size, size)


@numba.njit
def widen_some(element, source, depth, target):
    """Widen some pairs of a block of int8."""
    if not _IN_COLUMNS:
        widen(element, source.start, depth * VECTORS, target)
    else:
        for column in range(VECTORS):
            widen(
                element,
                source.start + column * source.column,
                depth,
                target + column * depth * VECTOR_BYTES,
            )
    return matrix_of(target, 0, depth, VECTOR_BYTES)


@numba.njit
def depth_of(call, num_rows, most):
    """Return how many pairs of inputs are multiplied at once: few rows read no columns twice,
    others equal parts.
    """
    if num_rows <= _TILE and call.is_int8 == 0:
        return call.num_pairs
    num_parts = (call.num_pairs + most - 1) // most
    return (call.num_pairs + num_parts * tiles.PAIRS - 1) // (num_parts * tiles.PAIRS) * tiles.PAIRS


@numba.njit
def multiply_rows(element, call, sums, widened, block, first, num_rows):
    """Multiply some rows with a block of the weight."""
    row_bytes = call.num_pairs * 4
    at_once = DEPTH
    size = VECTOR_BYTES
    if call.is_int8 != 0:
        at_once = min(WIDENED, DEPTH)
        size = VECTOR_BYTES // 2
    if HAS_TILES:
        at_once = depth_of(call, num_rows, at_once)
    weight = call.weight + block * call.num_pairs * VECTORS * size
    wide_x = widened + WIDENED * _SUM_BYTES
    num_tiles = (num_rows + _TILE - 1) // _TILE
    for start in range(0, call.num_pairs, at_once):
        depth = min(at_once, call.num_pairs - start)
        x = Matrix(call.x + first * row_bytes + start * 4, row_bytes)
        right = matrix_of(weight, start, call.num_pairs, size)
        if call.is_int8 != 0:
            right = widen_some(element, right, depth, widened)
        if _X_BYTES > 0:
            for row in range(num_rows):
                copy_row(
                    _WIDE, x.start + row * row_bytes, depth * 2 // LANES, wide_x + row * depth * 8
                )
            x = Matrix(wide_x, depth * 8)
        for tile in range(num_tiles):
            row = tile * num_rows // num_tiles
            end = (tile + 1) * num_rows // num_tiles
            if HAS_TILES:
                row = tile * _TILE
                end = min(num_rows, (tile + 1) * _TILE)
            left = Matrix(x.start + row * x.stride, x.stride)
            out = Matrix(sums + row * _SUM_BYTES, _SUM_BYTES)
            ahead = right.start + (depth + tile * depth // PREFETCHED) * _SUM_BYTES
            if not HAS_TILES and first % ROWS + tile > 0:
                ahead = 0  # the first rows have brought them
            multiply_tile(
                element, end - row, VECTORS, left, right, depth, out, min(start, 1), ahead
            )


@numba.njit
def write_rows(element, call, sums, block, first, num_rows):
    """Write some rows of a block, whose sums are followed by those of a second block if it is a
    gate.
    """
    width = call.num_blocks >> call.is_gated
    scales = call.scales + block * _SUM_BYTES
    bias = call.bias + block * _SUM_BYTES
    for row in range(num_rows):
        place = ((first + row) * width + block) * (_SUM_BYTES // 2)
        mine = sums + row * _SUM_BYTES
        out = call.out + place
        if call.is_gated:
            other = mine + ROWS * _SUM_BYTES
            across = width * _SUM_BYTES
            write_gated(element, mine, scales, bias, other, scales + across, bias + across, out)
        else:
            write_sums(
                element, mine, scales, bias, call.residual + place * min(call.residual, 1), out
            )


@numba.njit
def num_items(call, num_rows):
    """Return the number of items of a call."""
    return (call.num_blocks >> call.is_gated) * ((num_rows + ROWS - 1) // ROWS)


@numba.njit
def run_item(element, call, num_all, sums, number):
    """Multiply up to ROWS of all rows with a block, or with a gate's and the one that it belongs
    to.
    """
    block, part = divmod(number, (num_all + ROWS - 1) // ROWS)
    at_once = ROWS
    if HAS_TILES:  # rows stay in a core's cache while weights pass
        part, block = divmod(number, call.num_blocks >> call.is_gated)
    elif HAS_BF16 and call.num_pairs <= DEPTH and call.is_int8 == 0:
        at_once = TILE  # fewer sums take less of a first cache
    end = min(num_all, (part + 1) * ROWS)
    others = sums + ROWS * _SUM_BYTES
    widened = others + ROWS * _SUM_BYTES
    for first in range(part * ROWS, end, at_once):
        num_rows = min(at_once, end - first)
        multiply_rows(element, call, sums, widened, block, first, num_rows)
        if call.is_gated:
            multiply_rows(
                element, call, others, widened, block + call.num_blocks // 2, first, num_rows
            )
        write_rows(element, call, sums, block, first, num_rows)


def takes(weight: Tensor) -> bool:
    """Return True if the kernel multiplies with a weight [O, I] of this shape and type."""
    is_served = weight.dtype in (torch.bfloat16, torch.int8)
    return is_served and weight.shape[0] % BLOCK == 0 and weight.shape[1] % MULTIPLE == 0


def lay_out(weight: Tensor) -> Tensor:
    """Copy a weight [O, I] that the kernel takes to [O / BLOCK, I / 2, VECTORS, LANES, 2], int8 to
    [..., 2, LANES].

    Without avx512_bf16 the order is [O / BLOCK, VECTORS, I / 2, ...].
    """
    assert takes(weight)
    order = (0, 1, 3, 2, 4) if _IN_COLUMNS else (0, 3, 1, 2, 4)
    pairs = weight.unflatten(0, (-1, VECTORS, LANES)).unflatten(3, (-1, 2)).permute(order)
    return (pairs.transpose(-1, -2) if weight.dtype == torch.int8 else pairs).contiguous()
