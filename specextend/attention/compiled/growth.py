"""An EAGLE head in one call, compiled by numba: it reads what was decided, or grows the trees of a batch.

A tree grows level by level. The children of a level's nodes are ranked, the likeliest join the pool of all nodes, and
those of them that are among the best so far are the rows of the next level (`decoding.tree.grow_trees`). Workers take
items of a phase, as in `decoder`; before each level one of them prepares it alone, and says how many items its phases
have.

numba is the extra `cpu`: import this module only where it is installed.

Shapes: `B` sequences, `F` rows of each, `R` rows in all, `C` hidden size, `V` tokens that the head proposes, `D` head
size, `P` nodes of a pool, `M` nodes so far that were rows.
"""

import ctypes
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from specextend.attention.compiled import attend, decoder, items, products, tiles
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import add, add_to, copy_row, times
from specextend.attention.compiled.decoder import LINE, ROWS, load_wide, normalise, wait_for
from specextend.attention.compiled.vectors import LANES, VECTOR_BYTES, address, emitted
from specextend.attention.plan import AttentionPlan, KeySpan

PREPARE, EMBED, FUSE, COPY, LAYER = range(5)
NORM, LOGITS, RANK = range(LAYER + decoder.NUM_PHASES, LAYER + decoder.NUM_PHASES + 3)
NUM_PHASES = RANK + 1
TOKEN, PARENT, DEPTH, PLACE, IS_BEST, ROW = range(6)
"""Columns of a pool: a node's place among all that were rows, 1 if it is a best one, its row in its level."""
POSITION, SOURCE, NODE, CURSOR, READ = range(5)
"""Columns of rows: the row of `sources`, the node, how many of its children the pool has, and the tokens it reads."""
START, VISIBLE, TEXT = range(3)
"""Columns of sequences: first row in the cache, rows that are visible, the first of the last three tokens."""
NEVER = -1e4
"""Least log probability of a path; that of NaN, too."""
_PRODUCTS = ("fuse", "copy", "lm_head")
_CHAIN = {
    "fuse": ("joined", "", "x"),
    "copy": ("embedded", "", "copy"),
    **decoder.CHAIN,
    "lm_head": ("hidden", "", "lm_head"),
}
_BITS, _PAIRS = np.uint32(0), products.ELEMENT(0)


class HeadCall(NamedTuple):
    """Hold what stands between the products of a head, by address, and sizes."""

    embedding: int
    embedding_norm: int
    feature_norm: int
    norm: int
    cosines: int
    """[positions, D], as `sines`, whose first half is negative."""
    sines: int
    vocabulary: int
    """[V] int64 token ids."""
    num_read: int
    """Tokens that a row reads: its own, and those before it."""
    rows: int
    """[R, 8] int64"""
    sequences: int
    """[B, 5] int64"""
    sources: int
    """Rows of C: the features of the target, or the head's own outputs."""
    pool: int
    """[B, P, 6] int64"""
    log_probs: int
    """[B, P] fp32, of paths"""
    best_tokens: int
    """[R, num_best] int64"""
    best: int
    """[R, num_best] fp32, log probabilities after the row."""
    num_sequences: int
    num_nodes: int
    num_best: int
    num_levels: int
    """0: the rows are there, and are read."""
    most_pooled: int
    num_pooled: int
    num_rows: int
    num_expanded: int
    is_done: int
    counters: int
    """int64, 0 at first: workers, and for each phase items begun, behind it their number, and items done."""
    least_gain: float
    """Of a level, in tokens to expect, in the mean of all sequences."""
    expected: float
    """Path probabilities of the best nodes so far."""
    eps: float


_OWN = np.dtype([(n, np.float64 if n in ("least_gain", "expected", "eps") else np.int64) for n in HeadCall._fields])
RECORD = np.dtype([("own", _OWN), ("layer", decoder.RECORD), *((name, products.RECORD) for name in _PRODUCTS)])


@emitted(types.voidptr)
def pointer(b, element, where):
    """Turn an address into a pointer."""
    return b.inttoptr(where, ir.PointerType())


@numba.njit
def integers(element, where, shape):
    """Return the int64 array at an address."""
    return numba.carray(pointer(element, where), shape, np.int64)


@numba.njit
def numbers(element, where, shape):
    """Return the fp32 array at an address."""
    return numba.carray(pointer(element, where), shape, np.float32)


@numba.njit
def rows_of(element, own):
    """Return the rows [R, 8] of a level."""
    return integers(element, own.rows, (own.num_rows, 8))


@emitted(types.float32)
def log_sum(b, element, logits, num_vectors):
    """Return the logarithm of the sum of the exponentials of numbers in bf16, to the base 2."""
    factor = vir.floats(math.log2(math.e))

    def at(i):
        return load_wide(b, address(b, logits, times(b, i, VECTOR_BYTES // 2)))

    [peaks] = vir.repeat(b, num_vectors, [vir.floats(-math.inf)], lambda i, peak: [vir.larger(b, at(i), peak)])
    peak = b.fmul(vir.splat(b, vir.across(b, peaks, vir.larger)), factor)

    def add_power(i, total):
        return [b.fadd(total, vir.exp2(b, b.fsub(b.fmul(at(i), factor), peak)))]

    [total] = vir.repeat(b, num_vectors, [vir.floats(0.0)], add_power)
    log2 = b.call(vir.declared(b, ir.FunctionType(vir.F32, [vir.F32]), "llvm.log2.f32"), [vir.across(b, total, add)])
    return b.fadd(log2, b.extract_element(peak, ir.Constant(vir.I32, 0)))


@emitted(types.int64)
def lanes_above(b, element, logits, least: float):
    """Return which of 16 numbers in bf16 are above one, a bit for each."""
    above = b.fcmp_ordered(">", load_wide(b, logits), vir.splat(b, least))
    return b.zext(b.bitcast(above, vir.I16), vir.I64)


@emitted(types.float32)
def number_at(b, element, logits):
    """Read a number in bf16."""
    bits = b.shl(b.zext(vir.load(b, logits, vir.I16, 2), vir.I32), ir.Constant(vir.I32, 16))
    return b.bitcast(bits, vir.F32)


@numba.njit
def rank_row(element, call, row):
    """Find the likeliest children of a row, best first, and their log probabilities."""
    own, num_vectors = call.own, call.lm_head.num_blocks * products.VECTORS
    logits = call.lm_head.out + row * num_vectors * 2 * LANES
    tokens = integers(element, own.best_tokens + 8 * row * own.num_best, own.num_best)
    best = numbers(element, own.best + 4 * row * own.num_best, own.num_best)
    tokens[:] = 0
    best[:] = -np.inf
    for i in range(num_vectors):
        above = lanes_above(element, logits + i * 2 * LANES, best[-1])
        lane = 0
        while above != 0:
            value = number_at(element, logits + (i * LANES + lane) * 2)
            if value > best[-1]:
                place = own.num_best - 1
                while place > 0 and best[place - 1] < value:
                    best[place], tokens[place] = best[place - 1], tokens[place - 1]
                    place -= 1
                best[place], tokens[place] = value, i * LANES + lane
            above >>= 1
            lane += 1
    total = log_sum(element, logits, num_vectors) * math.log(2)
    vocabulary = integers(element, own.vocabulary, num_vectors * LANES)
    for place in range(own.num_best):
        best[place] = min(best[place] - total, 0.0)  # no child may be likelier than its parent
        tokens[place] = vocabulary[tokens[place]]


@numba.njit
def add_children(element, own, sequence, pool, log_probs):
    """Append the likeliest children of a sequence's rows to its pool."""
    rows, width = rows_of(element, own), own.num_rows // own.num_sequences
    tokens = integers(element, own.best_tokens, (own.num_rows, own.num_best))
    best = numbers(element, own.best, (own.num_rows, own.num_best))
    for number in range(own.num_pooled, own.num_pooled + min(own.num_nodes, width * own.num_best)):
        chosen, most = -1, -np.inf
        for row in range(sequence * width, (sequence + 1) * width):
            if rows[row, CURSOR] < own.num_best:
                value = best[row, rows[row, CURSOR]] + log_probs[rows[row, NODE]]
                if not value > NEVER:
                    value = NEVER
                if value > most:
                    chosen, most = row, value
        parent = rows[chosen, NODE]
        pool[number, TOKEN] = tokens[chosen, rows[chosen, CURSOR]]
        pool[number, PARENT] = parent
        pool[number, DEPTH] = pool[parent, DEPTH] + 1
        log_probs[number] = most
        rows[chosen, CURSOR] += 1


@numba.njit
def mark_best(pool, log_probs, count, most):
    """Mark the `most` likeliest of `count` nodes, of two equal ones the earlier; return the sum of probabilities."""
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
def pool_of(element, own, sequence):
    """Return the nodes [P, 6] of a sequence, and their log probabilities [P]."""
    place = sequence * own.most_pooled
    pool = integers(element, own.pool + 8 * 6 * place, (own.most_pooled, 6))
    return pool, numbers(element, own.log_probs + 4 * place, own.most_pooled)


@numba.njit
def choose_rows(element, own, first, width):
    """Let the best of the newest nodes, those from `first` on, be the rows of the next level."""
    own.num_rows = own.num_sequences * width
    rows, row = rows_of(element, own), 0
    for sequence in range(own.num_sequences):
        pool = pool_of(element, own, sequence)[0]
        for wanted in (1, 0):  # where a sequence has fewer, others make up the number
            for number in range(first, own.num_pooled):
                if pool[number, IS_BEST] == wanted and row < (sequence + 1) * width:
                    rows[row, NODE] = number
                    row += 1


@numba.njit
def describe_rows(element, call, width):
    """Describe the rows of a level, of which nodes are known: tokens, sources, positions, places, mask."""
    own, attention = call.own, call.layer.attention
    before, rows = own.num_expanded, rows_of(element, own)
    own.num_expanded += width
    sequences = integers(element, own.sequences, (own.num_sequences, 5))
    cache_rows = integers(element, call.layer.own.rows, own.num_rows)
    spans = integers(element, attention.places, (3, own.num_sequences))
    mask = numba.carray(pointer(element, attention.mask), (own.num_rows, own.num_expanded), np.uint8)
    mask[:] = 0
    for number in range(own.num_rows):
        sequence, place = divmod(number, width)
        row, known, pool = rows[number], sequences[sequence], pool_of(element, own, sequence)[0]
        node = pool[row[NODE]]
        node[ROW], node[PLACE] = number, before + place
        row[SOURCE], row[CURSOR] = pool[node[PARENT], ROW], 0
        row[POSITION] = known[VISIBLE] + node[DEPTH] - 1
        cache_rows[number] = known[START] + known[VISIBLE] + node[PLACE]
        spans[1, sequence], spans[2, sequence] = known[VISIBLE] + own.num_expanded, known[VISIBLE]
        each = row[NODE]
        for i in range(max(own.num_read, node[DEPTH])):
            back = i - node[DEPTH]  # tokens behind the root
            if i < own.num_read:
                row[READ + i] = pool[each, TOKEN] if back <= 0 else known[TEXT + 2 - back]
            if back < 0:
                mask[number, pool[each, PLACE]] = 1
                each = pool[each, PARENT]


@numba.njit
def add_level(element, own, level):
    """Append the children of the last level; return how many rows of each sequence the next one has."""
    first, width, expected = own.num_pooled, 0, 0.0
    added = min(own.num_nodes, own.num_rows // own.num_sequences * own.num_best)
    for sequence in range(own.num_sequences):
        pool, log_probs = pool_of(element, own, sequence)
        add_children(element, own, sequence, pool, log_probs)
        expected += mark_best(pool, log_probs, first + added, own.num_nodes + 1)
        width = max(width, pool[first : first + added, IS_BEST].sum())
    own.num_pooled += added
    is_enough = expected - own.expected < own.least_gain * own.num_sequences
    own.expected = expected
    if level == own.num_levels or (level > 1 and is_enough):
        return 0
    choose_rows(element, own, first, width)
    return width


@numba.njit
def product_of(call, phase):
    """Return the product of a phase that is one."""
    if phase == FUSE:
        return call.fuse
    return call.copy if phase == COPY else call.lm_head


@numba.njit
def count_items(call, phase):
    """Return the number of items of a phase."""
    if phase in (FUSE, COPY, LOGITS):
        return products.num_items(product_of(call, phase))
    if phase == RANK:
        return call.own.num_rows
    if LAYER <= phase < NORM:
        return decoder.count_items(call.layer, phase - LAYER)
    return (call.own.num_rows + ROWS - 1) // ROWS


@numba.njit
def prepare(element, call, counter, level):
    """Prepare a level, of which one worker does this alone; `counter` is that of its first phase."""
    own = call.own
    if level > 0:
        width = add_level(element, own, level)
        if width == 0:
            own.is_done = 1
            return
        describe_rows(element, call, width)
        num_rows, attention = own.num_rows, call.layer.attention
        call.fuse.num_rows = num_rows
        call.copy.num_rows = num_rows
        call.layer.qkv.num_rows = num_rows
        call.layer.o_proj.num_rows = num_rows
        call.layer.gate_up.num_rows = num_rows
        call.layer.down_proj.num_rows = num_rows
        call.lm_head.num_rows = num_rows
        attention.num_queries = width
        attention.q_sequence = width * attention.q_token
        attention.num_row_blocks = (width * attention.group + attention.rows - 1) // attention.rows
        attention.mask_width = own.num_expanded
        num_groups = attention.num_sequences * attention.num_key_heads * attention.num_row_blocks
        integers(element, attention.counters, 2 + num_groups)[:] = 0
    for phase in range(EMBED, NUM_PHASES):
        is_asked = own.num_levels > 0 if phase >= LOGITS else level > 0 or own.num_levels == 0
        integers(element, counter + 2 * phase * LINE, 2)[1] = count_items(call, phase) if is_asked else 0


@numba.njit
def embed_rows(element, call, number):
    """Write what an item's rows read: their tokens' embeddings, normalised, and the features before them."""
    own = call.own
    row_bytes, num_vectors = 4 * call.layer.qkv.num_pairs, 2 * call.layer.qkv.num_pairs // LANES
    head_bytes = 2 * call.layer.attention.head_dim
    for place in range(number * ROWS, min(own.num_rows, (number + 1) * ROWS)):
        row = rows_of(element, own)[place]
        out, joined = call.copy.x + place * own.num_read * row_bytes, call.fuse.x + 2 * place * row_bytes
        for i in range(own.num_read):
            embedding = own.embedding + row[READ + i] * row_bytes
            normalise(element, embedding, own.embedding_norm, num_vectors, own.eps, out + i * row_bytes)
        copy_row(_BITS, out, row_bytes // VECTOR_BYTES, joined)
        source = own.sources + row[SOURCE] * row_bytes
        normalise(element, source, own.feature_norm, num_vectors, own.eps, joined + row_bytes)
        turn, angle = place * head_bytes, row[POSITION] * head_bytes
        copy_row(_BITS, own.cosines + angle, head_bytes // VECTOR_BYTES, call.layer.own.cos + turn)
        copy_row(_BITS, own.sines + angle, head_bytes // VECTOR_BYTES, call.layer.own.sin + turn)


@numba.njit
def run_item(element, call, phase, scratch, sums, number):
    """Do an item of a phase."""
    if phase == EMBED:
        embed_rows(element, call, number)
    elif phase in (FUSE, COPY, LOGITS):
        products.run_item(_PAIRS, product_of(call, phase), sums, number)
    elif phase == NORM:
        row_bytes, first = 4 * call.layer.qkv.num_pairs, number * ROWS
        for row in range(first, min(call.own.num_rows, first + ROWS)):
            source, out = call.layer.down_proj.out + row * row_bytes, call.lm_head.x + row * row_bytes
            normalise(element, source, call.own.norm, row_bytes // (2 * LANES), call.own.eps, out)
    elif phase == RANK:
        rank_row(element, call, number)
    else:
        decoder.run_item(element, call.layer, phase - LAYER, sums, scratch, number)


@numba.njit
def work(element, call):
    """Take items of all phases in order. Every worker of a call runs this once."""
    own = call.own
    worker, counter = add_to(element, own.counters, 1), own.counters + LINE
    scratch = items.memory_of(call.layer.attention, worker)
    sums = call.lm_head.workspace + worker * products.WORKER_BYTES
    tiles.configure(element)
    for level in range(own.num_levels + 1):
        for phase in range(NUM_PHASES):
            count = integers(element, counter, 2)[1] if phase > PREPARE else 1
            number = add_to(element, counter, 1)
            while number < count:
                if phase == PREPARE:
                    prepare(element, call, counter, level)
                else:
                    run_item(element, call, phase, scratch, sums, number)
                add_to(element, counter + LINE, 1)
                number = add_to(element, counter, 1)
            wait_for(element, counter + LINE, count)
            counter += 2 * LINE
            if own.is_done != 0:
                tiles.release(element)
                return
    tiles.release(element)


@cache
def kernel():
    """Compile `work`, or read it from numba's cache on disk: a function of a `RECORD`'s address."""
    version = (attend.ELEMENTS[torch.bfloat16](0), vir.VERSION)

    @numba.cfunc(types.void(types.CPointer(numba.from_dtype(RECORD))), cache=True)  # which caches by this file alone
    def entry(call):
        work(version[0], numba.carray(call, 1)[0])

    return entry


class Head:
    """An EAGLE head of ours, with its addresses."""

    def __init__(
        self,
        layer: decoder.Decoder,
        scale: float,
        linears: Mapping[str, Any],
        norms: Mapping[str, Tensor],
        embedding: Tensor,
        vocabulary: Tensor,
        angles: Tensor,
        eps: float,
        num_copied: int,
        group: int,
    ):
        """Take its one layer, and what stands around it.

        linears: the compiled products "fuse" [2C], "lm_head", and "copy" [4C] of `num_copied` heads if there are any.
        norms: weights [C] of the embedding, the features and the output, by names of `HeadCall`. angles [2, positions,
        D]: cosines, and sines, whose first half is negative.
        """
        self._kept = layer, linears, norms, embedding, angles
        self._vocabulary, self._scale = vocabulary, scale
        self._records = np.zeros(1, RECORD)
        [record] = self._records
        record["layer"] = layer.calls[0]
        record["layer"]["own"]["num_copied"] = num_copied
        for name, linear in linears.items():
            decoder.describe_weight(record[name], linear)
        own = record["own"]
        own["num_read"], own["eps"] = 4 if num_copied else 1, eps
        own["embedding"], own["vocabulary"] = embedding.data_ptr(), vocabulary.data_ptr()
        own["cosines"], own["sines"] = angles[0].data_ptr(), angles[1].data_ptr()
        for name, weight in norms.items():
            own[name] = weight.data_ptr()
        self._group = group

    def read(self, tokens: Tensor, features: Tensor, positions: Tensor, plan: AttentionPlan, stored: Tensor) -> Tensor:
        """Run causal rows, and write theirs to the cache [1, 2, K, S, D]; return hidden [B, T, C].

        tokens [B, T, 1] or, with copy heads, [B, T, 4], each row's own and those before it, nearest first; features [B,
        T, C] before each row; positions [B, T].
        """
        batch, width, num_read = tokens.shape
        rows = torch.zeros(batch * width, 8, dtype=torch.int64)
        rows[:, POSITION], rows[:, SOURCE] = positions.flatten(), torch.arange(batch * width)
        rows[:, READ : READ + num_read] = tokens.flatten(0, 1)
        kept = {"rows": rows, "sources": features.contiguous()}
        written = plan.new_rows(tokens.device).contiguous()
        hidden = self._run(self._records.copy(), width, plan.spans[0], stored, written, kept, None)
        return hidden.view(batch, width, -1)

    def grow(
        self,
        roots: Tensor,
        hidden: Tensor,
        texts: Tensor,
        places: Tensor,
        stored: Tensor,
        num_nodes: int,
        num_levels: int,
        least_gain: float,
    ) -> tuple[Tensor, Tensor]:
        """Grow trees as `decoding.tree.grow_trees` does, behind roots [B] with the head's outputs hidden [B, C].

        texts [B, 3]: the last tokens, the root last. places [B, 2]: first row in the cache, and rows that are visible.
        Returns all nodes that were found, token ids, parents and depths [3, B, P], and log_probs [B, P].
        """
        batch, most_rows = len(roots), num_nodes * (num_levels - 1)
        num_best, most_pooled = min(num_nodes, len(self._vocabulary)), 1 + num_levels * num_nodes
        rows = torch.zeros(batch * num_nodes, 8, dtype=torch.int64)
        pool = torch.zeros(batch, most_pooled, 6, dtype=torch.int64)
        pool[:, 0, TOKEN], pool[:, 0, PARENT], pool[:, 0, ROW] = roots, -1, torch.arange(batch)
        log_probs = torch.zeros(batch, most_pooled)
        kept = {
            "rows": rows,
            "sequences": torch.cat([places, texts], 1),
            "pool": pool,
            "log_probs": log_probs,
            "best": torch.empty(len(rows), num_best),
            "best_tokens": torch.empty(len(rows), num_best, dtype=torch.int64),
        }
        records = self._records.copy()
        own = records[0]["own"]
        own["num_nodes"], own["num_levels"], own["least_gain"] = num_nodes, num_levels, least_gain
        own["num_best"], own["most_pooled"], own["num_pooled"] = num_best, most_pooled, 1
        mask = torch.empty(batch, num_nodes, most_rows, dtype=torch.bool)
        starts, visible = places.T.tolist()
        span = KeySpan(starts, [length + most_rows for length in visible], mask, needs_lse=False)
        self._run(records, num_nodes, span, stored, torch.empty_like(rows[:, 0]), kept, hidden)
        count = int(own["num_pooled"])
        return pool[:, :count, :PLACE].permute(2, 0, 1).contiguous(), log_probs[:, :count]

    def _run(
        self,
        records: Any,
        width: int,
        span: KeySpan,
        stored: Tensor,
        rows: Tensor,
        kept: Mapping[str, Tensor],
        roots: Tensor | None,
    ) -> Tensor:
        """Run up to `width` rows of each sequence, which are written to `rows` of the cache; return hidden [R, C].

        kept: the tensors of a `HeadCall`. roots: what it grows from.
        """
        [record] = records
        own, layer, batch = record["own"], record["layer"], len(span.starts)
        num_rows, head_dim = batch * width, stored.shape[4]
        linked = {name: record[name] if name in _PRODUCTS else layer[name] for name in _CHAIN}
        widths = {_CHAIN[name][2]: int(product["num_blocks"]) * products.BLOCK for name, product in linked.items()}
        size, num_heads = widths["x"], stored.shape[2] * self._group
        widths |= {"embedded": size * int(own["num_read"]), "joined": 2 * size, "gate_up": widths["gate_up"] // 2}
        widths |= dict.fromkeys(("normed", "hidden"), size)
        widths |= dict.fromkeys(("turned", "mixed"), num_heads * head_dim) | dict.fromkeys(("cos", "sin"), head_dim)
        made = {name: products.empty_rows(stored, num_rows, width) for name, width in widths.items()}
        if roots is not None:
            made["hidden"][: len(roots)] = roots
            kept = {**kept, "sources": made["hidden"]}
        shares = attend.share(batch, stored.shape[2], width * self._group, max(span.lengths))
        queries, mixed = (made[name].view(batch, width, num_heads, head_dim) for name in ("turned", "mixed"))
        call = attend.describe(queries, stored[0, 0], stored[0, 1], mixed, None, span, self._scale, shares)
        finished = torch.zeros(2 + shares.num_groups, dtype=torch.int64)
        layer["attention"] = (*call, finished.data_ptr())
        workspace = torch.empty(shares.num_workers, products.WORKER_BYTES, dtype=torch.uint8)
        counters = torch.zeros(1 + 2 * NUM_PHASES * (1 + int(own["num_levels"])), LINE // 8, dtype=torch.int64)
        at = {name: tensor.data_ptr() for name, tensor in made.items()}
        num_begun = num_rows if roots is None else batch
        decoder.link(linked, _CHAIN, at, num_begun, workspace.data_ptr())
        head = layer["own"]
        head["cos"], head["sin"], head["copied"], head["rows"] = at["cos"], at["sin"], at["copy"], rows.data_ptr()
        own["num_rows"], own["num_sequences"] = num_begun, batch
        own["counters"] = counters.data_ptr()
        for name, tensor in kept.items():
            own[name] = tensor.data_ptr()
        attend.run_on(shares.num_workers, kernel(), ctypes.c_void_p(records.ctypes.data))
        return made["hidden"]
