"""The phases of a call: the layers of a model, and the steps around the layer of an EAGLE head.

A *phase*, such as a product or attention, is a number of items. Workers take items until none is
left, and wait until all are done. A single worker prepares a level of phases.

A tree grows level by level: the likeliest children join the pool of nodes, and the new nodes among
the best so far are the rows of the next level (`decoding.tree.grow_trees`).

More shapes: `V` tokens that the head proposes, `P` nodes of a pool.
"""

import math
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from specextend.attention.compiled import blocks, items, products, tiles
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import (
    add,
    add_to,
    copy_row,
    integers,
    load_units,
    numbers,
    pointer,
)
from specextend.attention.compiled.vectors import (
    FLOATS,
    LANES,
    VECTOR_BYTES,
    address,
    emitted,
    nth,
    store,
    times,
)

PREPARE, EMBED, FUSE, COPY, INPUT_NORM, QKV, ROTATE, ATTEND, ROUND_MIXED = range(9)
O_PROJ, POST_NORM, GATE_UP, ROUND_GATED, DOWN_PROJ, NORM, LOGITS, RANK, NUM_KINDS = range(9, 18)
"""Kinds of phases; INPUT_NORM to DOWN_PROJ repeat for each layer."""
NUM_OF_LAYER = NORM - INPUT_NORM
LINE = 64
"""Bytes of a cache line; each counter has a separate line."""
TOKEN, PARENT, DEPTH, PLACE, IS_BEST, ROW = range(6)
"""Columns of a pool. PLACE counts nodes that were rows, ROW is the row in the node's level."""
SOURCE, NODE, CURSOR, READ = range(4)
"""Columns of rows: row of `sources`, node, number of children in the pool, tokens to read."""
START, VISIBLE, COUNT = range(3)
"""Columns of sequences: first cache row, visible rows after reading, number of decided tokens."""
BEFORE = 3
NEVER = -1e4
"""Lower bound of a path's log probability, also for NaN."""
ROWS = 4
SPINS = 2000
"""Polls of a counter, some tens of microseconds, before a worker yields its processor."""
PRODUCTS = (FUSE, COPY, QKV, O_PROJ, GATE_UP, DOWN_PROJ, LOGITS)
OF_LAYER = ("qkv", "o_proj", "gate_up", "down_proj")
OTHERS = ("fuse", "copy", "lm_head")
"""Products of a layer, and all others."""
BITS = blocks.BF16_PAIRS(0)


class LayerCall(NamedTuple):
    """Norm weights of a layer, by address."""

    input_norm: int
    post_norm: int
    query_norm: int
    """[D]; 0 without norms of heads."""
    key_norm: int
    eps: float


LAYER = np.dtype(
    [
        ("own", [*LayerCall.__annotations__.items()]),
        ("attention", items.RECORD),
        *((name, products.RECORD) for name in OF_LAYER),
    ]
)


class Call(NamedTuple):
    """Values shared by phases, tensors by address, and sizes."""

    first: int
    end: int
    """Phase after the last with items."""
    layers: int
    num_layers: int
    workspace: int
    counters: int
    """int64, initially 0: workers; for each phase, items begun by share, items done, number of
    items.
    """
    num_shares: int
    """Shares of a phase's items; a worker starts with the rows in its cache."""
    num_rows: int
    cos: int
    """[positions, D], as `sin`; the first half of sines is negative."""
    sin: int
    positions: int
    """[R] int64"""
    cache_rows: int
    copied: int
    """[R, heads, D] queries, keys and values to copy."""
    num_copied: int
    """Copied key heads, the last ones of the cache."""
    embedding: int
    embedding_norm: int
    feature_norm: int
    norm: int
    vocabulary: int
    """[V] int64 token ids."""
    num_read: int
    """Tokens that a row reads: its token and earlier ones."""
    tree_rows: int
    """[R, 8] int64"""
    sequences: int
    """[B, 3] int64"""
    texts: int
    """[B, BEFORE + T] int64 tokens, roots last."""
    num_decided: int
    """T; the last `COUNT` tokens of a sequence are new."""
    sources: int
    """Rows [C]: target features, or outputs of the head."""
    pool: int
    """[B, P, 6] int64"""
    log_probs: int
    """[B, P] fp32 of paths."""
    best_tokens: int
    """[R, num_best] int64"""
    best: int
    """[R, num_best] fp32 log probabilities after the row."""
    num_sequences: int
    num_nodes: int
    num_best: int
    num_levels: int
    """0 if no tree grows."""
    most_pooled: int
    num_pooled: int
    num_expanded: int
    is_done: int
    least_gain: float
    """Expected tokens that a level must add, as a mean of sequences."""
    expected: float
    """Probability of the best nodes so far."""
    eps: float


RECORD = np.dtype(
    [
        ("own", [*Call.__annotations__.items()]),
        *((name, products.RECORD) for name in OTHERS),
    ]
)


@emitted(types.CPointer(numba.from_dtype(LAYER)))
def layers_at(b, where):
    return vir.pointer_to(b, where)


def load_wide(b, where):
    return b.bitcast(load_units(b, blocks.BF16_WIDENED, where), FLOATS)


@emitted()
def normalise(b, x, weight, num_vectors, eps: float, out):
    """Write the RMSNorm of a row of bf16."""

    def add_square(i, total):
        value = load_wide(b, nth(b, x, i, VECTOR_BYTES // 2))
        return [vir.fma(b, value, value, total)]

    [squares] = vir.repeat(b, num_vectors, add_square, [vir.floats(0.0)])
    mean = b.fdiv(vir.across(b, squares, add), b.sitofp(times(b, num_vectors, LANES), vir.F32))
    root = vir.call(b, vir.F32, "llvm.sqrt.f32", b.fadd(mean, eps))
    factor = vir.splat(b, b.fdiv(ir.Constant(vir.F32, 1.0), root))

    def scale(i):
        value = b.fmul(load_wide(b, nth(b, x, i, VECTOR_BYTES // 2)), factor)
        value = b.fmul(value, load_wide(b, nth(b, weight, i, VECTOR_BYTES // 2)))
        store(b, vir.to_bf16(b, value), nth(b, out, i, VECTOR_BYTES // 2), 2)

    vir.repeat(b, num_vectors, scale)


@emitted()
def turn(b, head, cos, sin, num_vectors, out):
    """Apply RoPE to a head with halves of `num_vectors`; `out` may be the head."""
    half = times(b, num_vectors, VECTOR_BYTES // 2)

    def body(i):
        low = times(b, i, VECTOR_BYTES // 2)
        high = b.add(low, half)
        x, y = (load_wide(b, address(b, head, offset)) for offset in (low, high))
        for value, other, offset in ((x, y, low), (y, x, high)):
            factors = (load_wide(b, address(b, each, offset)) for each in (cos, sin))
            turned = vir.fma(b, value, next(factors), b.fmul(other, next(factors)))
            store(b, vir.to_bf16(b, turned), address(b, out, offset), 2)

    vir.repeat(b, num_vectors, body)


@emitted(types.int64)
def look_at(b, counter):
    """Read a shared counter after a pause."""
    vir.call(b, ir.VoidType(), "llvm.x86.sse2.pause")
    return b.load_atomic(vir.pointer_to(b, counter), "acquire", 8, typ=vir.I64)


@emitted()
def give_way(b):
    vir.call(b, vir.I32, "sched_yield")


@numba.njit
def wait_for(counter, count):
    """Wait until a counter reaches `count`."""
    looks = 0
    while look_at(counter) < count:
        looks += 1
        if looks > SPINS:
            give_way()


@numba.njit
def normalise_rows(source, weight, width, eps, out, first, end):
    for row in range(first, end):
        place = row * width * 2
        normalise(source + place, weight, width // LANES, eps, out + place)


@numba.njit
def rotate_rows(own, layer, first, end):
    """Apply RoPE to an item's rows, write keys and values, and copy `own.copied`."""
    call = layer.attention
    norms = layer.own
    head_bytes = 2 * call.head_dim
    num_keys = call.num_key_heads - own.num_copied
    num_queries = num_keys * call.group
    for row in range(first, end):
        place = integers(own.cache_rows, own.num_rows)[row] * call.row
        angles = integers(own.positions, own.num_rows)[row] * head_bytes
        heads = layer.qkv.out + row * (num_queries + 2 * num_keys) * head_bytes
        queries = call.q + row * call.q_token
        keys = call.k + place
        values = call.v + place
        for i in range(num_queries + num_keys):
            head = heads + i * head_bytes
            out = queries + i * head_bytes
            norm = norms.query_norm
            if i >= num_queries:
                out = keys + (i - num_queries) * call.head
                norm = norms.key_norm
            if norm != 0:
                normalise(head, norm, call.head_dim // LANES, norms.eps, head)
            turn(head, own.cos + angles, own.sin + angles, call.head_dim // (2 * LANES), out)
        for i in range(num_keys):
            value = heads + (num_queries + num_keys + i) * head_bytes
            copy_row(BITS, value, head_bytes // VECTOR_BYTES, values + i * call.head)
        ready = own.copied + row * own.num_copied * (call.group + 2) * head_bytes
        for i in range(own.num_copied * (call.group + 2)):
            out = queries + (num_queries + i) * head_bytes
            key = i - own.num_copied * call.group
            if key >= own.num_copied:
                out = values + (num_keys + key - own.num_copied) * call.head
            elif key >= 0:
                out = keys + (num_keys + key) * call.head
            copy_row(BITS, ready + i * head_bytes, head_bytes // VECTOR_BYTES, out)


@numba.njit
def rows_of(own):
    return integers(own.tree_rows, (own.num_rows, 8))


@emitted(types.float32)
def log_sum(b, logits, num_vectors):
    """Return the base-2 logarithm of the sum of exponentials of bf16 numbers."""
    factor = vir.floats(math.log2(math.e))

    def at(i):
        return load_wide(b, nth(b, logits, i, VECTOR_BYTES // 2))

    [peaks] = vir.repeat(
        b, num_vectors, lambda i, peak: [vir.larger(b, at(i), peak)], [vir.floats(-math.inf)]
    )
    peak = b.fmul(vir.splat(b, vir.across(b, peaks, vir.larger)), factor)

    def add_power(i, total):
        return [b.fadd(total, vir.exp2(b, b.fsub(b.fmul(at(i), factor), peak)))]

    [total] = vir.repeat(b, num_vectors, add_power, [vir.floats(0.0)])
    log2 = vir.call(b, vir.F32, "llvm.log2.f32", vir.across(b, total, add))
    return b.fadd(log2, b.extract_element(peak, ir.Constant(vir.I32, 0)))


@emitted(types.int64)
def lanes_above(b, logits, least: float):
    """Return a bit mask of the 16 lanes in bf16 above `least`."""
    above = b.fcmp_ordered(">", load_wide(b, logits), vir.splat(b, least))
    return b.zext(b.bitcast(above, vir.I16), vir.I64)


@emitted(types.float32)
def number_at(b, logits):
    bits = b.shl(b.zext(vir.load(b, logits, vir.I16, 2), vir.I32), ir.Constant(vir.I32, 16))
    return b.bitcast(bits, vir.F32)


@numba.njit
def rank_row(call, row):
    """Find the likeliest children of a row, best first."""
    own = call.own
    if rows_of(own)[row, CURSOR] != 0:
        return  # it has no children
    num_vectors = call.lm_head.num_blocks * products.VECTORS
    logits = call.lm_head.out + row * num_vectors * 2 * LANES
    tokens = integers(own.best_tokens + 8 * row * own.num_best, own.num_best)
    best = numbers(own.best + 4 * row * own.num_best, own.num_best)
    tokens[:] = 0
    best[:] = -np.inf
    for i in range(num_vectors):
        above = lanes_above(logits + i * 2 * LANES, best[-1])
        lane = 0
        while above != 0:
            value = number_at(logits + (i * LANES + lane) * 2)
            if value > best[-1]:
                place = own.num_best - 1
                while place > 0 and best[place - 1] < value:
                    best[place], tokens[place] = best[place - 1], tokens[place - 1]
                    place -= 1
                best[place], tokens[place] = value, i * LANES + lane
            above >>= 1
            lane += 1
    total = log_sum(logits, num_vectors) * math.log(2)
    vocabulary = integers(own.vocabulary, num_vectors * LANES)
    for place in range(own.num_best):
        best[place] = min(best[place] - total, 0.0)  # no child may be likelier than its parent
        tokens[place] = vocabulary[tokens[place]]


@numba.njit
def add_children(own, sequence, pool, log_probs, count):
    """Append the `count` likeliest children to a sequence's pool."""
    rows = rows_of(own)
    width = own.num_rows // own.num_sequences
    tokens = integers(own.best_tokens, (own.num_rows, own.num_best))
    best = numbers(own.best, (own.num_rows, own.num_best))
    for number in range(own.num_pooled, own.num_pooled + count):
        chosen = -1
        most = -np.inf
        for row in range(sequence * width, (sequence + 1) * width):
            if rows[row, CURSOR] < own.num_best:
                value = best[row, rows[row, CURSOR]] + log_probs[rows[row, NODE]]
                if not value > NEVER:
                    value = NEVER
                if value > most:
                    chosen = row
                    most = value
        parent = rows[chosen, NODE]
        pool[number, TOKEN] = tokens[chosen, rows[chosen, CURSOR]]
        pool[number, PARENT] = parent
        pool[number, DEPTH] = pool[parent, DEPTH] + 1
        log_probs[number] = most
        rows[chosen, CURSOR] += 1


@numba.njit
def mark_best(pool, log_probs, count, most):
    """Mark the `most` likeliest of `count` nodes, earlier ones first; return their probability."""
    pool[:count, IS_BEST] = 0
    total = 0.0
    for _ in range(min(most, count)):
        best = -1
        for number in range(count):
            if pool[number, IS_BEST] == 0 and (best < 0 or log_probs[number] > log_probs[best]):
                best = number
        pool[best, IS_BEST] = 1
        total += math.exp(log_probs[best])
    return total


@numba.njit
def pool_of(own, sequence):
    place = sequence * own.most_pooled
    pool = integers(own.pool + 8 * 6 * place, (own.most_pooled, 6))
    return pool, numbers(own.log_probs + 4 * place, own.most_pooled)


@numba.njit
def choose_rows(own, first, width):
    """Make the best new nodes, from `first` on, the rows of the next level."""
    own.num_rows = own.num_sequences * width
    rows = rows_of(own)
    row = 0
    for sequence in range(own.num_sequences):
        pool = pool_of(own, sequence)[0]
        for wanted in (1, 0):  # other nodes fill up sequences with fewer
            for number in range(first, own.num_pooled):
                if pool[number, IS_BEST] == wanted and row < (sequence + 1) * width:
                    rows[row, NODE] = number
                    row += 1


@numba.njit
def describe_rows(own, attention, level):
    """Describe the rows of a level: tokens, sources, positions, cache rows, mask.

    Rows of the first level read decided tokens in order, the root last.
    """
    width = own.num_rows // own.num_sequences
    before = own.num_expanded
    if level > 0:
        own.num_expanded += width
    attention.num_queries = width
    attention.mask_width = max(width, own.num_expanded)
    rows = rows_of(own)
    sequences = integers(own.sequences, (own.num_sequences, 3))
    texts = integers(own.texts, (own.num_sequences, BEFORE + own.num_decided))
    cache_rows = integers(own.cache_rows, own.num_rows)
    positions = integers(own.positions, own.num_rows)
    spans = integers(attention.places, (2, own.num_sequences))
    mask = numba.carray(pointer(attention.mask), (own.num_rows, attention.mask_width), np.uint8)
    mask[:] = 0
    for number in range(own.num_rows):
        sequence, place = divmod(number, width)
        row = rows[number]
        known = sequences[sequence]
        spans[1, sequence] = known[VISIBLE] + own.num_expanded
        if level == 0:
            later = width - 1 - place
            stands = known[VISIBLE] - 1 - later
            row[SOURCE] = number
            row[CURSOR] = own.num_best if later > 0 else 0  # no children are asked for
            positions[number] = max(0, stands)
            # rows before the decided tokens go to an unused place
            cache_rows[number] = known[START] + (stands if later < known[COUNT] else known[VISIBLE])
            mask[number, : place + 1] = 1
            for i in range(own.num_read):
                row[READ + i] = texts[sequence, BEFORE + place - i]
            continue
        pool = pool_of(own, sequence)[0]
        node = pool[row[NODE]]
        node[ROW], node[PLACE] = number, before + place
        row[SOURCE], row[CURSOR] = pool[node[PARENT], ROW], 0
        positions[number] = known[VISIBLE] + node[DEPTH] - 1
        cache_rows[number] = known[START] + known[VISIBLE] + node[PLACE]
        each = row[NODE]
        for i in range(max(own.num_read, node[DEPTH])):
            back = i - node[DEPTH]  # tokens behind the root
            if i < own.num_read:
                row[READ + i] = (
                    pool[each, TOKEN]
                    if back <= 0
                    else texts[sequence, BEFORE + own.num_decided - 1 - back]
                )
            if back < 0:
                mask[number, pool[each, PLACE]] = 1
                each = pool[each, PARENT]


@numba.njit
def add_level(own, level):
    first = own.num_pooled
    width = 0
    expected = 0.0
    parents = own.num_rows // own.num_sequences if level > 1 else 1
    added = min(own.num_nodes, parents * own.num_best)
    for sequence in range(own.num_sequences):
        pool, log_probs = pool_of(own, sequence)
        add_children(own, sequence, pool, log_probs, added)
        expected += mark_best(pool, log_probs, first + added, own.num_nodes + 1)
        width = max(width, pool[first : first + added, IS_BEST].sum())
    own.num_pooled += added
    is_enough = expected - own.expected < own.least_gain * own.num_sequences
    own.expected = expected
    if level == own.num_levels or (level > 1 and is_enough):
        return 0
    choose_rows(own, first, width)
    return width


@numba.njit
def product_of(call, layer, kind):
    """Return the product of a phase."""
    if kind == FUSE:
        return call.fuse
    if kind == COPY:
        return call.copy
    if kind == QKV:
        return layer.qkv
    if kind == O_PROJ:
        return layer.o_proj
    if kind == GATE_UP:
        return layer.gate_up
    return layer.down_proj if kind == DOWN_PROJ else call.lm_head


@numba.njit
def place_of(own, phase):
    layer = min(max(0, (phase - INPUT_NORM) // NUM_OF_LAYER), own.num_layers - 1)
    return phase - layer * NUM_OF_LAYER, layer


@numba.njit
def count_items(call, layer, kind):
    num_rows = call.own.num_rows
    if kind in PRODUCTS:
        return products.num_items(product_of(call, layer, kind), num_rows)
    if kind == ATTEND:
        return items.num_items(layer.attention)
    if kind in (ROUND_MIXED, ROUND_GATED) and not product_of(call, layer, kind + 1).is_int8:
        return 0
    return num_rows if kind == RANK else (num_rows + ROWS - 1) // ROWS


@numba.njit
def prepare(call, layers, counter, level):
    """Prepare a level on a single worker, with the counter of its first phase."""
    own = call.own
    if level > 0:
        if add_level(own, level) == 0:
            own.is_done = 1
            return
        own.sources = call.lm_head.x
    if own.num_levels > 0:
        attention = layers[0].attention
        describe_rows(own, attention, level)
        integers(attention.counters, 2 + items.num_items(attention) // attention.num_parts)[:] = 0
    for phase in range(PREPARE + 1, NUM_KINDS + (own.num_layers - 1) * NUM_OF_LAYER):
        kind, layer = place_of(own, phase)
        is_asked = own.first <= kind and phase < own.end
        integers(counter + (2 * phase + 1) * LINE, 2)[1] = (
            count_items(call, layers[layer], kind) if is_asked else 0
        )


@numba.njit
def embed_rows(call, layer, first, end):
    """Write inputs of an item's rows: normalised embeddings and features."""
    own = call.own
    num_vectors = layer.o_proj.num_blocks * products.VECTORS
    row_bytes = num_vectors * 2 * LANES
    for place in range(first, end):
        row = rows_of(own)[place]
        out = call.copy.x + place * own.num_read * row_bytes
        joined = call.fuse.x + 2 * place * row_bytes
        for i in range(own.num_read):
            embedding = own.embedding + row[READ + i] * row_bytes
            normalise(embedding, own.embedding_norm, num_vectors, own.eps, out + i * row_bytes)
        copy_row(BITS, out, row_bytes // VECTOR_BYTES, joined)
        source = own.sources + row[SOURCE] * row_bytes
        normalise(source, own.feature_norm, num_vectors, own.eps, joined + row_bytes)


@numba.njit
def run_item(element, call, layer, kind, scratch, sums, number):
    """Do an item of a phase."""
    own = call.own
    norms = layer.own
    width = layer.o_proj.num_blocks * products.BLOCK
    first = number * ROWS
    end = min(own.num_rows, first + ROWS)
    if kind in PRODUCTS:
        product = product_of(call, layer, kind)
        if product.is_int8:
            products.run_item(products.BYTES, product, own.num_rows, sums, number)
        else:
            products.run_item(products.ELEMENT, product, own.num_rows, sums, number)
    elif kind == ATTEND:
        items.run_item(element, layer.attention, scratch, number)
    elif kind == ROTATE:
        rotate_rows(own, layer, first, end)
    elif kind == EMBED:
        embed_rows(call, layer, first, end)
    elif kind == RANK:
        rank_row(call, number)
    else:
        source = layer.o_proj.residual
        weight = norms.input_norm
        eps = norms.eps
        out = layer.qkv.x
        if kind == POST_NORM:
            source = layer.down_proj.residual
            weight = norms.post_norm
            out = layer.gate_up.x
        elif kind == NORM:
            source = layer.down_proj.out
            weight = own.norm
            eps = own.eps
            out = call.lm_head.x
        if kind not in (ROUND_MIXED, ROUND_GATED):
            normalise_rows(source, weight, width, eps, out, first, end)
        product = product_of(call, layer, kind + 1)
        if product.is_int8:
            products.round_rows(product, first, end)


@numba.njit
def work(element, call):
    """Take items of all phases in order, on each worker of a call."""
    own = call.own
    layers = numba.carray(layers_at(own.layers), own.num_layers)
    worker = add_to(own.counters, 1)
    shares = own.num_shares
    counter = own.counters + LINE
    scratch = items.memory_of(layers[0].attention, worker)
    sums = own.workspace + worker * products.WORKER_BYTES
    tiles.configure()
    for level in range(own.num_levels + 1):
        for phase in range(NUM_KINDS + (own.num_layers - 1) * NUM_OF_LAYER):
            kind, layer = place_of(own, phase)
            count = integers(counter + LINE, 2)[1] if kind > PREPARE else 1
            for turn in range(shares):
                share = (worker + turn) % shares
                while True:
                    number = count * share // shares + add_to(counter + 8 * share, 1)
                    if number >= count * (share + 1) // shares:
                        break
                    if kind == PREPARE:
                        prepare(call, layers, counter, level)
                    else:
                        run_item(element, call, layers[layer], kind, scratch, sums, number)
                    add_to(counter + LINE, 1)
            wait_for(counter + LINE, count)
            counter += 2 * LINE
            if own.is_done != 0:
                tiles.release()
                return
    tiles.release()


@cache
def kernel():
    """Compile `work`, or load it from numba's cache."""
    version = (items.BF16(0), vir.VERSION)

    # numba's cache only checks this file
    @numba.cfunc(types.void(types.CPointer(numba.from_dtype(RECORD))), cache=True)
    def entry(call):
        work(version[0], numba.carray(call, 1)[0])

    return entry
