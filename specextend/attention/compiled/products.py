"""Products of linear layers in bf16 or int8, for processors with AVX2 or more.

The weight is laid out once, in blocks of `BLOCK` outputs with inputs in units of 32 bits: pairs of
bf16 or groups of bytes. An item of work is a block for up to `ROWS` rows of x. They are multiplied
`DEPTH` units at a time, a part of the weight that stays in a core's cache. Without avx512_bf16,
pairs are widened to fp32 in registers, and x beforehand.

For int8, `round_rows` rounds x to bytes, with a scale for each `GROUP` inputs. Integer sums of a
group are exact; groups are added in fp32, in order, and scaled by output.
"""

from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from specextend.attention.compiled import blocks, tiles
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import (
    GROUP,
    GROUP_UNITS,
    TILE,
    copy_row,
    load_units,
    round_row,
    tile_rows,
)
from specextend.attention.compiled.items import Matrix, Wide
from specextend.attention.compiled.items import multiply as multiply_tile
from specextend.attention.compiled.vectors import (
    FLOATS,
    HAS_BF16,
    LANES,
    REGISTER_LANES,
    VECTOR_BYTES,
    address,
    emitted,
    load,
    store,
)

VECTORS = 4
BLOCK = VECTORS * LANES
ROWS = 256 if tiles.HAS_TILES else 96
"""Most rows of an item; a multiple of a tile's."""
DEPTH = 96 if tiles.HAS_TILES else 1024 if HAS_BF16 else 256
"""Units multiplied at a time, limited by a core's cache."""
BYTES_DEPTH = (1024 if REGISTER_LANES == LANES else 256) // GROUP_UNITS * GROUP_UNITS
"""Likewise for bytes, in whole groups."""
BYTES = blocks.INT8(0)
ELEMENT = (blocks.BF16_PAIRS if HAS_BF16 else blocks.BF16_WEIGHTS)(0)
_TILE = tiles.ROWS if tiles.HAS_TILES else TILE if HAS_BF16 else 5
_IN_COLUMNS = not HAS_BF16
"""Whether a block stores its vectors one after another, because a tile has only one."""
PREFETCHED = 16
"""Tiles of rows over which the next product's columns are prefetched."""
_WIDE = blocks.BF16_WIDENED(0)
MULTIPLE = 2 * tiles.PAIRS if tiles.HAS_TILES else 2 if HAS_BF16 else LANES
"""Divisor of the number of inputs."""
_SUM_BYTES = VECTORS * VECTOR_BYTES
_X_BYTES = 0 if HAS_BF16 else ROWS * DEPTH * 8
WORKER_BYTES = 2 * ROWS * _SUM_BYTES + _X_BYTES
"""Memory of a worker: sums of ROWS rows for two blocks, x in fp32."""


class LinearCall(NamedTuple):
    """A call's tensors by address, and its sizes."""

    x: int
    weight: int
    rounded: int
    """[T, num_units] rows of x from `blocks.round_row`, for int8."""
    is_int8: int
    scales: int
    bias: int
    """[O] fp32, as the scales."""
    out: int
    num_units: int
    """Units of a row: I / 2 pairs of bf16, or I / GROUP groups of bytes."""
    num_blocks: int
    residual: int
    """[T, O] bf16 to add; 0 for none."""
    is_gated: int
    """1 to write SwiGLU; the first half of the outputs is the gate."""


RECORD = np.dtype([*LinearCall.__annotations__.items()])


def emit_output(b, i, sums, scales, bias):
    return vir.fma(
        b, *(load(b, address(b, each, i * VECTOR_BYTES)) for each in (sums, scales, bias))
    )


@emitted()
def write_sums(b, sums, scales, bias, residual, out):
    """Write a row's outputs as bf16, plus the residual unless its address is 0."""
    is_added = b.icmp_signed("!=", residual, vir.number(0))
    for i in range(VECTORS):
        offset = i * VECTOR_BYTES // 2
        added = load_units(
            b, blocks.BF16_WIDENED, address(b, b.select(is_added, residual, out), offset)
        )
        added = b.bitcast(b.select(is_added, added, vir.units([0] * LANES)), FLOATS)
        value = b.fadd(emit_output(b, i, sums, scales, bias), added)
        store(b, vir.to_bf16(b, value), address(b, out, offset), 2)


@emitted()
def write_gated(
    b, gate, gate_scales, gate_bias, sums, scales, bias,
    out,
):  # fmt: skip
    for i in range(VECTORS):
        value = b.fmul(
            vir.silu(b, emit_output(b, i, gate, gate_scales, gate_bias)),
            emit_output(b, i, sums, scales, bias),
        )
        store(b, vir.to_bf16(b, value), address(b, out, i * VECTOR_BYTES // 2), 2)


@numba.njit
def multiply_rows(element, call, sums, wide_x, block, first, num_rows):
    row_bytes = call.num_units * 4
    most = min(_TILE, tile_rows(element))
    is_tiled = most == tiles.ROWS
    at_once = BYTES_DEPTH if call.is_int8 else DEPTH
    if is_tiled:  # few rows read no columns twice, others read equal parts
        parts = tiles.PAIRS * ((call.num_units + DEPTH - 1) // DEPTH if num_rows > _TILE else 1)
        at_once = (call.num_units + parts - 1) // parts * tiles.PAIRS
    weight = call.weight + block * call.num_units * _SUM_BYTES
    num_tiles = (num_rows + most - 1) // most
    for start in range(0, call.num_units, at_once):
        depth = min(at_once, call.num_units - start)
        x = Matrix(
            (call.rounded if call.is_int8 else call.x) + first * row_bytes + start * 4, row_bytes
        )
        right = Wide(weight + start * _SUM_BYTES, _SUM_BYTES, VECTOR_BYTES)
        if _IN_COLUMNS:
            columns = call.num_units * VECTOR_BYTES
            right = Wide(weight + start * VECTOR_BYTES, VECTOR_BYTES, columns)
        if _X_BYTES > 0 and call.is_int8 == 0:
            for row in range(num_rows):
                copy_row(
                    _WIDE, x.start + row * row_bytes, depth * 2 // LANES, wide_x + row * depth * 8
                )
            x = Matrix(wide_x, depth * 8)
        for tile in range(num_tiles):
            row = tile * num_rows // num_tiles
            end = (tile + 1) * num_rows // num_tiles
            if is_tiled:
                row = tile * most
                end = min(num_rows, (tile + 1) * most)
            left = Matrix(x.start + row * x.stride, x.stride)
            out = Matrix(sums + row * _SUM_BYTES, _SUM_BYTES)
            ahead = right.start + (depth + tile * depth // PREFETCHED) * _SUM_BYTES
            if not is_tiled and first % ROWS + tile > 0:
                ahead = 0  # already prefetched by the first rows
            multiply_tile(
                element, end - row, VECTORS, left, right, depth, out, min(start, 1), ahead
            )


@numba.njit
def write_rows(call, sums, block, first, num_rows):
    """Write some rows of a block; for a gate, sums of its second block follow."""
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
            write_gated(mine, scales, bias, other, scales + across, bias + across, out)
        else:
            write_sums(mine, scales, bias, call.residual + place * min(call.residual, 1), out)


@numba.njit
def num_items(call, num_rows):
    return (call.num_blocks >> call.is_gated) * ((num_rows + ROWS - 1) // ROWS)


@numba.njit
def run_item(element, call, num_all, sums, number):
    """Multiply up to ROWS rows with a block, and with the block it gates."""
    block, part = divmod(number, (num_all + ROWS - 1) // ROWS)
    at_once = ROWS
    most = min(_TILE, tile_rows(element))
    if most == tiles.ROWS:  # rows stay in a core's cache while weights pass
        part, block = divmod(number, call.num_blocks >> call.is_gated)
    elif call.num_units <= (BYTES_DEPTH if call.is_int8 else DEPTH) and (HAS_BF16 or call.is_int8):
        at_once = most  # fewer sums take less of a first cache
    end = min(num_all, (part + 1) * ROWS)
    others = sums + ROWS * _SUM_BYTES
    wide_x = others + ROWS * _SUM_BYTES
    for first in range(part * ROWS, end, at_once):
        num_rows = min(at_once, end - first)
        multiply_rows(element, call, sums, wide_x, block, first, num_rows)
        if call.is_gated:
            gated = block + call.num_blocks // 2
            multiply_rows(element, call, others, wide_x, gated, first, num_rows)
        write_rows(call, sums, block, first, num_rows)


@numba.njit
def round_rows(call, first, end):
    num_groups = call.num_units // GROUP_UNITS
    for row in range(first, end):
        source = call.x + row * num_groups * 2 * GROUP
        round_row(source, num_groups, call.rounded + row * call.num_units * 4)


def takes(weight: Tensor) -> bool:
    """Return True if the kernel takes weights [O, I] of this shape and type."""
    multiple = {torch.bfloat16: MULTIPLE, torch.int8: GROUP}.get(weight.dtype)
    is_served = multiple is not None and weight.shape[1] % multiple == 0
    return is_served and weight.shape[0] % BLOCK == 0


def lay_out(weight: Tensor) -> Tensor:
    """Copy a weight [O, I] to [O / BLOCK, num_units, VECTORS, LANES, -1].

    Without avx512_bf16 the layout is [O / BLOCK, VECTORS, num_units, ...].
    """
    assert takes(weight)
    units = weight.unflatten(1, (-1, 4 // weight.itemsize))
    if weight.dtype == torch.int8:
        groups = weight.unflatten(1, (-1, GROUP))
        too_much = -128 * groups.sum(-1, keepdim=True, dtype=torch.int32)
        units = torch.cat([too_much.view(torch.int8), groups], -1).flatten(1).unflatten(1, (-1, 4))
    order = (0, 1, 3, 2, 4) if _IN_COLUMNS else (0, 3, 1, 2, 4)
    return units.unflatten(0, (-1, VECTORS, LANES)).permute(order).contiguous()
