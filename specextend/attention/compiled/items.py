"""Attention of a work item: some rows of a key head, over all keys or a split of them.

Blocks of keys are laid out in scratch memory, multiplied with tiles of rows and weighed by an
online softmax. Splits are added in order. `element` is a layout of `blocks`.
"""

import math
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
from numba.core import types

from specextend.attention.compiled import blocks, tiles
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import BLOCK, HEADER, MOST_ROWS, WIDTHS, integers, numbers
from specextend.attention.compiled.vectors import LANES, VECTOR_BYTES

SPLIT = 512
"""Keys of a split, a multiple of BLOCK."""
BF16 = blocks.BF16_PAIRS if vir.HAS_BF16 else blocks.BF16_WIDENED

LN_2 = math.log(2)

_WIDTHS = np.array(WIDTHS)

_VALUES = blocks.BF16_VALUES(0)

# otherwise LLVM optimises callees again for each level of calls
inlined = numba.njit(inline="always")


class KernelCall(NamedTuple):
    """A call's tensors by address, their strides in bytes, and its sizes."""

    q: int
    q_token: int
    k: int
    v: int
    head: int
    """Stride of keys and values, as is `row`."""
    row: int
    out: int
    lse: int
    """0 if not wanted."""
    places: int
    """[2, B] int64: first row, number of rows."""
    mask: int
    """[B, T, M] bytes for the last M keys; 0 for none."""
    mask_width: int
    """M; 0 without a mask."""
    causal: int
    window: int
    """Most keys that a row of a causal call sees; 0: all."""
    num_sequences: int
    num_queries: int
    num_key_heads: int
    group: int
    head_dim: int
    rows: int
    num_parts: int
    """Items per row block: splits of the longest sequence, or 1."""
    workspace: int
    parts: int
    scale: float
    counters: int
    """int64, initially 0: workers, items begun, and parts done of each item."""


class WorkItem(NamedTuple):
    """Some rows of a key head."""

    sequence: int
    key_head: int
    first_row: int
    num_rows: int
    start: int
    length: int
    first_masked: int
    first_own: int
    """First block with separate keys for each query."""


class Scratch(NamedTuple):
    """Addresses in a worker's memory."""

    keys: int
    values: int
    queries: int
    scores: int
    weights: int
    states: int
    totals: int
    end: int


class Matrix(NamedTuple):
    """Rows of units or numbers in memory."""

    start: int
    stride: int


class Wide(NamedTuple):
    """Rows of several vectors in memory."""

    start: int
    stride: int
    column: int
    """Stride between vectors of a row."""


RECORD = np.dtype([*KernelCall.__annotations__.items()])


def padded_rows(rows):
    """Return the rows that need memory: matrix tiles write whole tiles from any row on."""
    return rows + MOST_ROWS - 1


memory_rows = numba.njit(padded_rows)


def divide(head_dim, rows, base):
    """Divide a worker's memory from `base` on, for rows from `padded_rows`."""
    block = BLOCK * head_dim * 4
    tile = MOST_ROWS * BLOCK * 4
    states = rows * (HEADER + head_dim * 4)
    values = base + block
    queries = values + block
    scores = queries + rows * head_dim * 4
    weights = scores + tile
    first = weights + tile
    return Scratch(
        base, values, queries, scores, weights, first, first + states, first + 2 * states
    )


scratch_of = numba.njit(divide)


@numba.njit
def state_of(call, states, row):
    return states + row * (HEADER + 4 * call.head_dim)


@numba.njit
def num_visible(call, item, row):
    """Return the keys up to the last visible to a row, apart from trees."""
    if call.causal == 0:
        return item.length
    return item.length - call.num_queries + (item.first_row + row) // call.group + 1


@numba.njit
def first_visible(call, item, row):
    return max(0, num_visible(call, item, row) - call.window) if call.window > 0 else 0


@numba.njit
def multiply(element, rows, width, left, right, depth, sums, accumulate, ahead):
    first = 0
    while first < width:
        many = min(_WIDTHS[rows - 1], width - first)
        blocks.product(
            element, rows, many, left.start, left.stride, right.start + first * right.column,
            right.stride,
            right.column, depth, sums.start + first * VECTOR_BYTES, sums.stride, accumulate, ahead,
        )  # fmt: skip
        first += many


@numba.njit
def hide(call, item, scores, block, row, num_rows, seen):
    """Hide scores from a tile's rows; each sees at most `seen` keys."""
    starts_before = first_visible(call, item, row + num_rows - 1) <= block
    if starts_before and min(seen, num_visible(call, item, row) - block) == BLOCK:
        return
    for i in range(num_rows):
        first = first_visible(call, item, row + i) - block
        end = min(seen, num_visible(call, item, row + i) - block)
        blocks.hide_outside(scores + i * BLOCK * 4, first, end)


@numba.njit
def takes_values_as_they_are(element, item, block):
    """Return True if a block's values are used once: laying them out does not pay."""
    return (
        blocks.is_widened(element) != 0
        and item.num_rows <= blocks.tile_rows(element)
        and block < item.first_own
    )


@numba.njit
def values_of(call, item, block):
    return call.v + item.key_head * call.head + (item.start + block) * call.row


@inlined
def attend_tile(element, call, item, scratch, states, block, row, num_rows, seen):
    """Attend with a tile of rows to at most `seen` keys of the block."""
    columns = blocks.unit_columns(element)
    head_bytes = 4 * call.head_dim
    queries = Matrix(scratch.queries + row * head_bytes // columns, head_bytes // columns)
    keys = Wide(scratch.keys, BLOCK * 4, VECTOR_BYTES)
    scores = Matrix(scratch.scores, BLOCK * 4)
    multiply(
        element,
        num_rows,
        (seen + LANES - 1) // LANES,
        queries,
        keys,
        call.head_dim // columns,
        scores,
        0,
        0,
    )
    hide(call, item, scratch.scores, block, row, num_rows, seen)
    vectors = call.head_dim // LANES
    first = state_of(call, states, row)
    blocks.weigh(
        element, num_rows, scratch.scores, first, vectors, call.scale / LN_2, scratch.weights
    )
    weights = Matrix(scratch.weights, BLOCK * 4 // columns)
    sums = Matrix(first + HEADER, HEADER + head_bytes)
    if takes_values_as_they_are(element, item, block):
        values = Wide(values_of(call, item, block), call.row, VECTOR_BYTES // 2)
        multiply(_VALUES, num_rows, vectors, weights, values, seen, sums, 1, 0)
    else:
        values = Wide(scratch.values, head_bytes, VECTOR_BYTES)
        depth = blocks.num_units(element, seen)
        multiply(element, num_rows, vectors, weights, values, depth, sums, 1, 0)


@numba.njit
def place_own(element, call, item, scratch, block, row):
    """Place the masked keys and values that a row's query sees as if there were no others.

    So a tree node attends to its path in the order of plain decoding. Return the visible keys.
    """
    query = item.sequence * call.num_queries + (item.first_row + row) // call.group
    mask = numba.carray(
        blocks.pointer(call.mask + query * call.mask_width), call.mask_width, np.uint8
    )
    position = item.first_masked
    for i in range(item.first_masked, item.length):
        if mask[call.mask_width - item.length + i] != 0:
            if block <= position < block + BLOCK:
                value = values_of(call, item, i)
                blocks.place_key(
                    element, value - call.v + call.k, call.head_dim, scratch.keys, position - block
                )
                blocks.place_value(element, value, call.head_dim, scratch.values, position - block)
            position += 1
    return min(BLOCK, position - block)


@inlined
def attend_split(element, call, item, scratch, states, first, last):
    """Attend to the keys from `first` to `last`, prefetching the next block."""
    vectors = call.head_dim // LANES
    lines = call.head_dim * blocks.element_size(element) // VECTOR_BYTES
    tile_rows = blocks.tile_rows(element)
    num_tiles = (item.num_rows + tile_rows - 1) // tile_rows
    # keys to prefetch with each tile; more at once would stall
    share = (BLOCK + num_tiles - 1) // num_tiles
    for row in range(item.num_rows):
        blocks.clear(state_of(call, states, row), vectors)
    first = max(first, first_visible(call, item, 0) // BLOCK * BLOCK)
    for block in range(first, last, BLOCK):
        values = values_of(call, item, block)
        num_keys = min(BLOCK, item.length - block)
        keys = values - call.v + call.k
        blocks.lay_keys(element, keys, call.row, num_keys, call.head_dim, scratch.keys)
        if not takes_values_as_they_are(element, item, block):
            blocks.lay_values(element, values, call.row, num_keys, vectors, scratch.values)
        row = 0
        while row < item.num_rows:
            num_rows = min(tile_rows, item.num_rows - row)
            if block >= item.first_own:
                num_rows = min(num_rows, call.group - (item.first_row + row) % call.group)
                seen = place_own(element, call, item, scratch, block, row)
            else:
                seen = min(num_keys, num_visible(call, item, row + num_rows - 1) - block)
                if first_visible(call, item, row) >= block + num_keys:
                    seen = 0
            # with tiles, rows are prefetched singly: so many at once would stall
            if not tiles.HAS_TILES:
                ahead = BLOCK + row // tile_rows * share
                blocks.fetch(keys + ahead * call.row, call.row, share, lines)
                blocks.fetch(values + ahead * call.row, call.row, share, lines)
            if seen > 0:
                attend_tile(element, call, item, scratch, states, block, row, num_rows, seen)
            row += num_rows


@numba.njit
def lay_queries(element, call, item, scratch):
    depth = call.head_dim // blocks.unit_columns(element)
    for row in range(item.num_rows):
        token, head = divmod(item.first_row + row, call.group)
        source = call.q + (item.sequence * call.num_queries + token) * call.q_token
        source += (item.key_head * call.group + head) * call.head_dim * blocks.element_size(element)
        blocks.copy_row(element, source, depth // LANES, scratch.queries + row * depth * 4)


@numba.njit
def write_results(element, call, item, totals):
    for row in range(item.num_rows):
        token, head = divmod(item.first_row + row, call.group)
        place = (item.sequence * call.num_queries + token) * call.num_key_heads * call.group
        place += item.key_head * call.group + head
        state = state_of(call, totals, row)
        out = call.out + place * call.head_dim * blocks.element_size(element)
        weight = blocks.finish(element, state, call.head_dim // LANES, out)
        if call.lse == 0:
            continue
        lse = -np.inf if weight == 0 else numbers(state, 1)[0] * call.scale + math.log(weight)
        numbers(call.lse + 4 * place, 1)[0] = lse


@numba.njit
def find_item(call, number):
    rest, key_head = divmod(number, call.num_key_heads)
    sequence, row_block = divmod(rest, num_row_blocks(call))
    first_row = row_block * call.rows
    num_rows = min(call.rows, call.num_queries * call.group - first_row)
    places = integers(call.places, (2, call.num_sequences))
    start = places[0, sequence]
    length = places[1, sequence]
    first_masked = max(0, length - call.mask_width)
    first_own = first_masked // BLOCK * BLOCK if call.mask != 0 else length
    return WorkItem(sequence, key_head, first_row, num_rows, start, length, first_masked, first_own)


@inlined
def run_item(element, call, scratch, number):
    """Attend to a part or to all keys; the last worker adds the parts."""
    which, part = divmod(number, call.num_parts)
    item = find_item(call, which)
    lay_queries(element, call, item, scratch)
    end = min(item.length, num_visible(call, item, item.num_rows - 1))
    alone = call.num_parts == 1
    size = state_of(call, 0, memory_rows(call.rows))
    totals = scratch.totals
    num_splits = max(1, (item.length + SPLIT - 1) // SPLIT)
    for split in range(0 if alone else part, num_splits if alone else part + 1):
        states = call.parts + number * size
        if alone:
            states = totals if split == 0 else scratch.states
        attend_split(
            element, call, item, scratch, states, split * SPLIT, min((split + 1) * SPLIT, end)
        )
        if alone and split > 0:
            add_up(call, item, totals, states)
    if not alone:
        if blocks.add_to(call.counters + 8 * (2 + which), 1) < call.num_parts - 1:
            return
        totals = call.parts + which * call.num_parts * size
        for each in range(1, call.num_parts):
            add_up(call, item, totals, totals + each * size)
    write_results(element, call, item, totals)


@numba.njit
def add_up(call, item, totals, states):
    for row in range(item.num_rows):
        total = state_of(call, totals, row)
        state = state_of(call, states, row)
        blocks.fold(total, state, call.head_dim // LANES, call.scale / LN_2)


@numba.njit
def num_row_blocks(call):
    return (call.num_queries * call.group + call.rows - 1) // call.rows


@numba.njit
def num_items(call):
    return call.num_sequences * call.num_key_heads * num_row_blocks(call) * call.num_parts


@numba.njit
def memory_of(call, worker):
    rows = memory_rows(call.rows)
    size = scratch_of(call.head_dim, rows, 0).end
    return scratch_of(call.head_dim, rows, call.workspace + worker * size)


@inlined
def work(element, call):
    """Take items until none is left, on each worker of a call."""
    scratch = memory_of(call, blocks.add_to(call.counters, 1))
    number = blocks.add_to(call.counters + 8, 1)
    tiles.configure()
    while number < num_items(call):
        run_item(element, call, scratch, number)
        number = blocks.add_to(call.counters + 8, 1)
    tiles.release()


@cache
def kernel(element):
    version = (element(0), vir.VERSION)

    @numba.cfunc(types.void(types.CPointer(numba.from_dtype(RECORD))), cache=True)
    def entry(call):
        work(version[0], numba.carray(call, 1)[0])

    return entry
