"""Operations on a block of keys and a tile of rows, in LLVM IR; `items` calls them.

Memory is given by addresses, and strides are in bytes. Blocks of keys lie in scratch memory in
*units* of 32 bits. The argument `element` is only a type, and selects the layout:

| element | tensors hold | a unit is | arithmetic |
|---|---|---|---|
| `FP32` | fp32 | a number | fp32 |
| `BF16_WIDENED` | bf16 | a number, widened to fp32 | fp32 |
| `BF16_PAIRS` | bf16 | two numbers | products of pairs (avx512_bf16), fp32 sums |
| `BF16_WEIGHTS` | bf16 | two numbers | fp32; weights are widened when multiplied |
| `INT8` | bytes | four numbers | integer sums, times a scale for each group |
| `BF16_VALUES` | bf16 | a number | fp32; values are widened when multiplied |

The *state* of a row is its reference score in 16 lanes, the sum of its weights in 16 parts, and the
weighted sum of values. The reference is the largest score so far, or at most `MARGIN` below it.
"""

import math
from functools import partial

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from specextend.attention.compiled import tiles
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.vectors import (
    FLOATS,
    LANES,
    REGISTER_LANES,
    UNITS,
    VECTOR_BYTES,
    address,
    emitted,
    load,
    nth,
    number,
    store,
    times,
)

FP32, INT8 = types.float32, types.uint8
BF16_WIDENED, BF16_PAIRS, BF16_WEIGHTS, BF16_VALUES = (
    types.uint16,
    types.uint32,
    types.int32,
    types.int16,
)
"""Layouts; numba types only because compiled code is specialised by type."""
BLOCK = 64
TILE = 6
"""Rows of a tile; with four vectors of columns, sums fill the 32 registers of AVX-512."""
MOST_ROWS = tiles.ROWS
"""Rows of a product with matrix tiles."""
WIDTHS = [4] * MOST_ROWS if REGISTER_LANES == LANES else [4, 2, 1, 1, 1, 1]
"""Vectors of columns that registers hold in a product of 1, 2, ... rows."""
AHEAD = 4096 if vir.HAS_BF16 else 2048
"""Bytes of weights to prefetch in products of several rows; twice as much for int8."""
MARGIN = 8.0
"""Weights above 2 to this power rescale their row; rescaling for each new maximum is 7% slower."""
LEAST = 2.0**-100
"""Lower bound of a group's largest number, with a finite inverse."""
HEADER = 2 * VECTOR_BYTES


GROUP = 64
"""Inputs that share a scale in a row of bytes."""
GROUP_UNITS = 1 + GROUP // 4
"""Units of a group. The first is a scale in fp32; in weights, -128 times the sum of the others,
because a row's bytes are 128 too large.
"""


def units_of(element):
    return 2 if element == BF16_PAIRS else 1


def load_units(b, element, where):
    if element != BF16_WIDENED:
        return load(b, where, UNITS)
    halves = b.zext(load(b, where, ir.VectorType(vir.I16, LANES), 2), UNITS)
    return b.shl(halves, vir.units([16] * LANES))


def is_tiled(element):
    return tiles.HAS_TILES and element == BF16_PAIRS


@emitted(types.int64)
def tile_rows(b, element):
    return number(MOST_ROWS if is_tiled(element) else TILE)


@emitted(types.int64)
def unit_columns(b, element):
    return number(units_of(element))


@emitted(types.int64)
def is_widened(b, element):
    """Return 1 for bf16 with fp32 arithmetic."""
    return number(int(element == BF16_WIDENED))


@emitted(types.int64)
def add_to(b, counter, amount):
    """Add to a counter shared by threads; return its old value."""
    return b.atomic_rmw("add", vir.pointer_to(b, counter), amount, "acq_rel")


def emit_copy(b, element, source, num_vectors, target):
    size = VECTOR_BYTES // 2 if element == BF16_WIDENED else VECTOR_BYTES

    def body(i):
        value = load_units(b, element, nth(b, source, i, size))
        store(b, value, nth(b, target, i))

    vir.repeat(b, num_vectors, body)


copy_row = emitted()(emit_copy)


def smaller(b, x, y):
    return b.select(b.icmp_signed("<", x, y), x, y)


@emitted()
def lay_keys(b, element, keys, stride, num_keys, head_dim, target):
    """Transpose a block of rows to [units][BLOCK], repeating the last row.

    For matrix tiles, rows of the next block are prefetched meanwhile, as in `lay_values`.
    """
    last = b.sub(num_keys, number(1))
    lanes = REGISTER_LANES
    numbers = 1 if element == FP32 else 2
    rows_each = 2 if element == BF16_WIDENED else 1  # rows of the block for each 32 bits of a key
    num_vectors = b.udiv(head_dim, number(lanes * numbers))

    def body(i):
        first, column = times(b, b.udiv(i, num_vectors), lanes), b.urem(i, num_vectors)
        source = nth(b, keys, column, 4 * lanes)
        rows = []
        for lane in range(lanes):
            row = smaller(b, address(b, first, lane), last)
            rows.append(
                load(b, address(b, source, b.mul(row, stride)), ir.VectorType(vir.I32, lanes))
            )
            if is_tiled(element):
                later = address(b, first, lane + BLOCK)
                vir.prefetch(b, address(b, source, b.mul(later, stride)), 2)
        place = address(
            b, target, times(b, column, lanes * rows_each * BLOCK * 4), times(b, first, 4)
        )
        for unit, values in enumerate(vir.transposed(b, rows)):
            for half, units in enumerate(widened(b, values) if rows_each == 2 else [values]):
                store(b, units, address(b, place, (rows_each * unit + half) * BLOCK * 4))

    groups = b.udiv(address(b, num_keys, lanes - 1), number(lanes))
    vir.repeat(b, b.mul(groups, num_vectors), body)


@emitted()
def lay_values(b, element, values, stride, num_keys, num_vectors, target):
    width = times(b, num_vectors, VECTOR_BYTES)

    def copy(row):
        place = address(b, target, b.mul(row, width))
        emit_copy(b, element, address(b, values, b.mul(row, stride)), num_vectors, place)

    def interleave(pair):
        numbers = [
            smaller(b, address(b, times(b, pair, 2), i), b.sub(num_keys, number(1)))
            for i in range(2)
        ]
        rows = [address(b, values, b.mul(row, stride)) for row in numbers]
        count = b.udiv(num_vectors, number(2))
        emit_pairs(b, rows[0], rows[1], count, address(b, target, b.mul(pair, width)))
        if is_tiled(element):
            for row in rows:
                later = address(b, row, times(b, stride, BLOCK))
                vir.repeat(b, count, partial(fetch_line, later))

    def fetch_line(later, i):
        vir.prefetch(b, nth(b, later, i), 2)

    if units_of(element) == 1:
        vir.repeat(b, num_keys, copy)
    else:
        vir.repeat(b, emit_num_units(b, element, num_keys), interleave)


def emit_num_units(b, element, num_keys):
    if units_of(element) == 1:
        return num_keys
    step = tiles.PAIRS if is_tiled(element) else 1
    return times(b, b.udiv(address(b, num_keys, 2 * step - 1), number(2 * step)), step)


num_units = emitted(types.int64)(emit_num_units)


def emit_pairs(b, first, second, count, target):
    halves = ir.VectorType(vir.I16, 2 * LANES)
    low = vir.units([lane for i in range(LANES) for lane in (i, i + 2 * LANES)])
    high = vir.units([lane for i in range(LANES, 2 * LANES) for lane in (i, i + 2 * LANES)])

    def body(i):
        x, y = (load(b, nth(b, row, i), halves) for row in (first, second))
        where = nth(b, target, i, 2 * VECTOR_BYTES)
        store(b, b.shuffle_vector(x, y, low), where)
        store(b, b.shuffle_vector(x, y, high), address(b, where, VECTOR_BYTES))

    vir.repeat(b, count, body)


@emitted(types.voidptr)
def pointer(b, where):
    return vir.pointer_to(b, where)


@numba.njit
def integers(where, shape):
    return numba.carray(pointer(where), shape, np.int64)


@numba.njit
def numbers(where, shape):
    return numba.carray(pointer(where), shape, np.float32)


@numba.njit
def place_key(element, key, head_dim, keys, column):
    units = head_dim // unit_columns(element)
    target = numba.carray(pointer(keys), (units, BLOCK), np.uint32)
    source = numba.carray(pointer(key), units, np.uint32)
    halves = numba.carray(pointer(key), units, np.uint16)
    for i in range(units):
        target[i, column] = (
            np.uint32(halves[i]) << np.uint32(16) if is_widened(element) else source[i]
        )


@numba.njit
def place_value(element, value, head_dim, values, row):
    """Copy a row to a row, or half a row of pairs, of a block of values."""
    if unit_columns(element) == 1:
        copy_row(element, value, head_dim // LANES, values + row * head_dim * 4)
    else:
        pairs = numba.carray(pointer(values), (BLOCK // 2, head_dim, 2), np.uint16)
        pairs[row // 2, :, row % 2] = numba.carray(pointer(value), head_dim, np.uint16)


@emitted()
def fetch(b, source, stride, num_rows, num_lines):
    def fetch_row(row):
        start = address(b, source, b.mul(row, stride))

        def fetch_line(line):
            vir.prefetch(b, nth(b, start, line))

        vir.repeat(b, num_lines, fetch_line)

    vir.repeat(b, num_rows, fetch_row)


def emit_product(
    b, element, rows, width, left, left_stride, right, right_stride,
    right_column, depth, sums, sums_stride, accumulate, ahead,
):  # fmt: skip
    starts = [address(b, left, b.mul(left_stride, number(row))) for row in range(rows)]
    places = [
        address(b, sums, b.mul(sums_stride, number(row)), VECTOR_BYTES * column)
        for row in range(rows)
        for column in range(width)
    ]
    columns = [address(b, right, times(b, right_column, column)) for column in range(width)]
    emit = emit_groups if element == INT8 else emit_sums
    emit(b, element, starts, columns, right_stride, depth, places, accumulate, ahead)


def emit_sums(b, element, starts, columns, right_stride, depth, places, accumulate, ahead):
    keep = b.icmp_signed("!=", accumulate, number(0))
    carried = [b.select(keep, load(b, place), vir.floats(0.0)) for place in places]
    sums = emit_units(b, element, starts, columns, right_stride, depth, carried, ahead)
    for place, value in zip(places, sums, strict=True):
        store(b, value, place)


def emit_groups(b, element, starts, columns, right_stride, depth, places, accumulate, ahead):
    def add_group(group):
        first = times(b, group, GROUP_UNITS)
        scales = [nth(b, start, first, 4) for start in starts]
        weights = [address(b, column, b.mul(first, right_stride)) for column in columns]
        carried = [load(b, each, UNITS) for each in weights] * len(starts)
        rows = [address(b, each, 4) for each in scales]
        weights = [address(b, each, right_stride) for each in weights]
        count = number(GROUP_UNITS - 1)
        sums = emit_units(b, element, rows, weights, right_stride, count, carried, ahead)
        keep = b.icmp_signed("!=", b.or_(accumulate, group), number(0))
        for at, (place, value) in enumerate(zip(places, sums, strict=True)):
            scale = vir.splat(b, load(b, scales[at // len(columns)], vir.F32))
            before = b.select(keep, load(b, place), vir.floats(0.0))
            store(b, vir.fma(b, b.sitofp(value, FLOATS), scale, before), place)

    vir.repeat(b, b.udiv(depth, number(GROUP_UNITS)), add_group)


def emit_units(b, element, starts, columns, right_stride, depth, carried, ahead):
    numbers = 2 if element == BF16_WEIGHTS else 1
    kind = BF16_WIDENED if element == BF16_VALUES else BF16_PAIRS
    distance = 2 * AHEAD if element == INT8 else AHEAD

    def body(i, *old):
        new = list(old)
        places = [address(b, column, b.mul(i, right_stride)) for column in columns]
        vectors = [load_units(b, kind, place) for place in places]
        with b.if_then(b.icmp_signed("!=", ahead, number(0))):
            for place in places:
                vir.prefetch(b, address(b, place, distance))
        halves = (
            zip(*(widened(b, each) for each in vectors), strict=True) if numbers == 2 else [vectors]
        )
        for half, units in enumerate(halves):
            for row, start in enumerate(starts):
                where = address(b, nth(b, start, i, 4 * numbers), 4 * half)
                unit = vir.splat(b, load(b, where, vir.I32))
                for column, y in enumerate(units):
                    at = row * len(columns) + column
                    if element == INT8:
                        new[at] = vir.dot_bytes(b, new[at], unit, y)
                    elif element == BF16_PAIRS:
                        new[at] = vir.dot_pairs(b, new[at], unit, y)
                    else:
                        new[at] = vir.fma(b, b.bitcast(unit, FLOATS), b.bitcast(y, FLOATS), new[at])
        return new

    return vir.repeat(b, depth, body, carried)


@emitted()
def round_row(b, x, num_groups, out):
    """Write a row of bf16 as groups of bytes: the scale, then numbers / scale + 128.

    Numbers that are not finite make their group's scale infinite or NaN.
    """

    def round_group(group):
        source, target = nth(b, x, group, 2 * GROUP), nth(b, out, group, 4 * GROUP_UNITS)
        values = [
            load_units(b, BF16_WIDENED, address(b, source, 2 * first))
            for first in range(0, GROUP, LANES)
        ]

        def larger(b, x, y):
            return b.select(b.icmp_unsigned(">", x, y), x, y)

        sizes = [b.and_(value, vir.units([0x7FFFFFFF] * LANES)) for value in values]
        most = b.bitcast(vir.across(b, joined(b, sizes, larger), larger), vir.F32)
        least, largest = ir.Constant(vir.F32, LEAST), ir.Constant(vir.F32, 127.0)
        most = b.select(b.fcmp_ordered("<", most, least), least, most)
        store(b, b.fdiv(most, largest), target)
        factor = vir.splat(b, b.fdiv(largest, most))
        for i, value in enumerate(values):
            scaled = b.fmul(b.bitcast(value, FLOATS), factor)
            # rounds to an integer in the low bits
            shifted = b.bitcast(b.fadd(scaled, vir.floats(1.5 * 2**23 + 128)), UNITS)
            low = b.trunc(shifted, ir.VectorType(vir.I8, LANES))
            store(b, low, address(b, target, 4 + i * LANES), 1)

    vir.repeat(b, num_groups, round_group)


def widened(b, pairs):
    count = pairs.type.count
    return b.shl(pairs, vir.units([16] * count)), b.and_(pairs, vir.units([-(1 << 16)] * count))


@emitted()
def product(
    b, element, rows, width, left, left_stride, right,
    right_stride, right_column, depth, sums, sums_stride, accumulate,
    ahead,
):  # fmt: skip
    """Multiply left [rows, depth] units by right [depth, width] vectors of units into `sums`.

    Matrix tiles always read and write `MOST_ROWS` rows, and prefetch a later product from `ahead`.
    Otherwise `AHEAD` bytes are prefetched unless `ahead` is 0.
    """
    places = (
        left,
        left_stride,
        right,
        right_stride,
        right_column,
        depth,
        sums,
        sums_stride,
        accumulate,
        ahead,
    )
    done = b.append_basic_block("done")
    base = max(WIDTHS) + 1
    if is_tiled(element):
        choice = b.switch(width, done)
        emits = {w: partial(tiles.emit_product, b, w) for w in range(1, base)}
    else:
        choice = b.switch(b.add(times(b, rows, base), width), done)
        emits = {
            r * base + w: partial(emit_product, b, element, r, w)
            for r in range(1, TILE + 1)
            for w in range(1, WIDTHS[r - 1] + 1)
        }
    for size, emit in emits.items():
        case = b.append_basic_block("product")
        choice.add_case(number(size), case)
        b.position_at_end(case)
        emit(*places)
        b.branch(done)
    b.position_at_end(done)


@emitted()
def hide_outside(b, scores, first, end):
    """Set scores before `first` and from `end` on to -inf."""
    firsts, ends = (vir.splat(b, b.trunc(each, vir.I32)) for each in (first, end))
    for place in range(0, BLOCK, LANES):
        where = address(b, scores, 4 * place)
        places = vir.units(range(place, place + LANES))
        visible = b.and_(b.icmp_signed(">=", places, firsts), b.icmp_signed("<", places, ends))
        store(b, b.select(visible, load(b, where), vir.floats(-math.inf)), where)


def joined(b, vectors, join):
    """Join vectors in pairs, in a fixed order."""
    while len(vectors) > 1:
        vectors = [join(b, x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def add(b, x, y):
    return b.fadd(x, y)


def finite(b, x):
    """Return 0 for -inf, so that rows without visible keys get weights of 0 instead of NaN."""
    return b.select(b.fcmp_ordered("==", x, vir.floats(-math.inf)), vir.floats(0.0), x)


def emit_weighing(b, element, scores, state, num_vectors, factor, margin):
    """Emit a row's weights and add them to its sum, rescaling beyond the margin."""
    values = [load(b, address(b, scores, 4 * first)) for first in range(0, BLOCK, LANES)]
    peak = joined(b, values, vir.larger)
    old = load(b, state)
    more = b.bitcast(b.fcmp_ordered(">", peak, b.fadd(old, margin)), vir.I16)
    with b.if_then(b.icmp_unsigned("!=", more, ir.Constant(vir.I16, 0)), likely=False):
        new = vir.splat(b, vir.across(b, vir.larger(b, peak, old), vir.larger))
        first = b.extract_element(old, ir.Constant(vir.I32, 0))
        with b.if_then(b.fcmp_ordered("!=", first, ir.Constant(vir.F32, -math.inf))):
            shrink = vir.exp2(b, b.fmul(b.fsub(old, new), factor))

            def rescale(i):
                where = nth(b, address(b, state, VECTOR_BYTES), i)
                store(b, b.fmul(load(b, where), shrink), where)

            vir.repeat(b, address(b, num_vectors, 1), rescale)
        store(b, new, state)
    shift = b.fneg(b.fmul(finite(b, load(b, state)), factor))
    coefficients = vir.EXP2 if units_of(element) == 1 else vir.SHORT_EXP2
    weights = [vir.exp2(b, vir.fma(b, value, factor, shift), coefficients) for value in values]
    sums = address(b, state, VECTOR_BYTES)
    store(b, b.fadd(load(b, sums), joined(b, weights, add)), sums)
    return weights


@emitted()
def weigh(
    b, element, num_rows, scores, states, num_vectors, scale: float,
    weights,
):  # fmt: skip
    """Turn a tile's scores into weights; rescale rows if scores have grown.

    `scale` is the factor of scores times log2(e). Rows after the tile get weights of 0.
    """
    factor, margin = vir.splat(b, scale), vir.splat(b, b.fdiv(ir.Constant(vir.F32, MARGIN), scale))
    state_bytes = address(b, times(b, num_vectors, VECTOR_BYTES), HEADER)
    pairs = units_of(element) == 2

    def body(row):
        source = nth(b, scores, row, BLOCK * 4)
        state = address(b, states, b.mul(row, state_bytes))
        target = nth(b, weights, row, BLOCK * 4 // units_of(element))
        values = emit_weighing(b, element, source, state, num_vectors, factor, margin)
        if pairs:
            values = [
                vir.pair_of_bf16(b, *two) for two in zip(values[::2], values[1::2], strict=True)
            ]
        for i, value in enumerate(values):
            store(b, value, address(b, target, i * VECTOR_BYTES))

    vir.repeat(b, num_rows, body)
    if is_tiled(element):  # tiles add to rows after the last
        end = times(b, num_rows, BLOCK * 2 // VECTOR_BYTES)
        missing = b.sub(number(MOST_ROWS * BLOCK * 2 // VECTOR_BYTES), end)

        def forget(i):
            store(b, vir.floats(0.0), nth(b, weights, b.add(end, i)))

        with b.if_then(b.icmp_signed(">", missing, number(0))):
            vir.repeat(b, missing, forget)


@emitted()
def clear(b, state, num_vectors):
    store(b, vir.floats(-math.inf), state)

    def body(i):
        store(b, vir.floats(0.0), nth(b, address(b, state, VECTOR_BYTES), i))

    vir.repeat(b, address(b, num_vectors, 1), body)


@emitted()
def fold(b, total, part, num_vectors, scale: float):
    """Add the state of a row over other keys to its total."""
    old = load(b, total)
    other = load(b, part)
    new = vir.larger(b, old, other)
    store(b, new, total)
    factor = vir.splat(b, scale)
    base = finite(b, new)
    mine, theirs = (vir.exp2(b, b.fmul(b.fsub(each, base), factor)) for each in (old, other))

    def body(i):
        offset = nth(b, number(VECTOR_BYTES), i)
        where = address(b, total, offset)
        added = b.fmul(load(b, address(b, part, offset)), theirs)
        store(b, vir.fma(b, load(b, where), mine, added), where)

    vir.repeat(b, address(b, num_vectors, 1), body)


@emitted(types.float32)
def finish(b, element, state, num_vectors, out):
    """Write a row's result, 0 if it saw no key; return the sum of its weights."""
    weight = vir.across(b, load(b, address(b, state, VECTOR_BYTES)), add)
    none = b.fcmp_ordered("==", weight, ir.Constant(vir.F32, 0.0))
    factor = b.select(none, ir.Constant(vir.F32, 0.0), b.fdiv(ir.Constant(vir.F32, 1.0), weight))

    def body(i):
        total = load(b, nth(b, address(b, state, HEADER), i))
        value = b.fmul(total, vir.splat(b, factor))
        if element == FP32:
            store(b, value, nth(b, out, i))
        else:
            store(b, vir.to_bf16(b, value), nth(b, out, i, VECTOR_BYTES // 2), 2)

    vir.repeat(b, num_vectors, body)
    return weight


@emitted(types.int64)
def element_size(b, element):
    return number(4 if element == FP32 else 2)
