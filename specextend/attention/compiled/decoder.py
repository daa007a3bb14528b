"""What a decoder layer does between its products, for rows of bf16, and how workers wait for each other.

They wait without the processor after a while: beside another busy process it may be what the one that is held up waits
for.

Shapes: `R` rows (the new tokens of all sequences), `C` hidden size, `D` head size.
"""

from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from specextend.attention.compiled import blocks, items, products
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import copy_row, integers, load_units, times
from specextend.attention.compiled.vectors import FLOATS, LANES, VECTOR_BYTES, address, emitted, store

ROWS = 4
"""Rows of an item between products."""
SPINS = 2000
"""Looks at a counter, some tens of microseconds, before a worker that waits gives its processor away."""
BITS = np.uint32(0)  # an element that is copied as it is
PRODUCTS = ("qkv", "o_proj", "gate_up", "down_proj")


class LayerCall(NamedTuple):
    """Hold the weights of a layer's norms by address."""

    input_norm: int
    post_norm: int
    query_norm: int
    """[D]; 0: heads are not normalised."""
    key_norm: int
    eps: float


OWN = np.dtype([(name, np.float64 if name == "eps" else np.int64) for name in LayerCall._fields])
RECORD = np.dtype([("own", OWN), ("attention", items.RECORD), *((name, products.RECORD) for name in PRODUCTS)])


def load_wide(b, where):
    """Read 16 numbers of bf16 as fp32."""
    return b.bitcast(load_units(b, types.uint16, where), FLOATS)


@emitted()
def normalise(b, element, x, weight, num_vectors, eps: float, out):
    """Write the RMSNorm of a row of bf16."""

    def at(base, i):
        return address(b, base, times(b, i, VECTOR_BYTES // 2))

    def add_square(i, total):
        value = load_wide(b, at(x, i))
        return [vir.fma(b, value, value, total)]

    [squares] = vir.repeat(b, num_vectors, [vir.floats(0.0)], add_square)
    mean = b.fdiv(vir.across(b, squares, blocks.add), b.sitofp(times(b, num_vectors, LANES), vir.F32))
    root = b.call(vir.declared(b, ir.FunctionType(vir.F32, [vir.F32]), "llvm.sqrt.f32"), [b.fadd(mean, eps)])
    factor = vir.splat(b, b.fdiv(ir.Constant(vir.F32, 1.0), root))

    def scale(i):
        value = b.fmul(b.fmul(load_wide(b, at(x, i)), factor), load_wide(b, at(weight, i)))
        store(b, vir.to_bf16(b, value), at(out, i), 2)

    vir.repeat(b, num_vectors, [], scale)


@emitted()
def turn(b, element, head, cos, sin, num_vectors, out):
    """Apply RoPE to a head, whose halves have `num_vectors` each; `out` may be the head."""
    half = times(b, num_vectors, VECTOR_BYTES // 2)

    def body(i):
        low = times(b, i, VECTOR_BYTES // 2)
        high = b.add(low, half)
        x, y = (load_wide(b, address(b, head, offset)) for offset in (low, high))
        for value, other, offset in ((x, y, low), (y, x, high)):
            factors = (load_wide(b, address(b, each, offset)) for each in (cos, sin))
            turned = vir.fma(b, value, next(factors), b.fmul(other, next(factors)))
            store(b, vir.to_bf16(b, turned), address(b, out, offset), 2)

    vir.repeat(b, num_vectors, [], body)


@emitted(types.int64)
def look_at(b, element, counter):
    """Read a counter that other threads add to, after a pause."""
    b.call(vir.declared(b, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), [])
    return b.load_atomic(b.inttoptr(counter, ir.PointerType()), "acquire", 8, typ=vir.I64)


@emitted()
def give_way(b, element):
    """Let another thread have the processor."""
    b.call(vir.declared(b, ir.FunctionType(vir.I32, []), "sched_yield"), [])


@numba.njit
def wait_for(element, counter, count):
    """Wait until a counter is `count`."""
    looks = 0
    while look_at(element, counter) < count:
        looks += 1
        if looks > SPINS:
            give_way(element)


@numba.njit
def normalise_rows(element, source, weight, width, eps, out, num_rows, number):
    """Write the norm of an item's rows, of `width` numbers each."""
    for row in range(number * ROWS, min(num_rows, (number + 1) * ROWS)):
        place = row * width * 2
        normalise(element, source + place, weight, width // LANES, eps, out + place)


@numba.njit
def rotate_rows(element, own, layer, number):
    """Apply RoPE to an item's queries and keys, and write keys and values to the cache; copy those of `own.copied`."""
    call, norms = layer.attention, layer.own
    head_bytes, num_keys = 2 * call.head_dim, call.num_key_heads - own.num_copied
    num_queries = num_keys * call.group
    for row in range(number * ROWS, min(own.num_rows, (number + 1) * ROWS)):
        place = integers(element, own.cache_rows, own.num_rows)[row] * call.row
        angles = integers(element, own.positions, own.num_rows)[row] * head_bytes
        first = layer.qkv.out + row * (num_queries + 2 * num_keys) * head_bytes
        queries, keys, values = call.q + row * call.q_token, call.k + place, call.v + place
        for i in range(num_queries + num_keys):
            head, out, norm = first + i * head_bytes, queries + i * head_bytes, norms.query_norm
            if i >= num_queries:
                out, norm = keys + (i - num_queries) * call.head, norms.key_norm
            if norm != 0:
                normalise(element, head, norm, call.head_dim // LANES, norms.eps, head)
            turn(element, head, own.cos + angles, own.sin + angles, call.head_dim // (2 * LANES), out)
        for i in range(num_keys):
            value = first + (num_queries + num_keys + i) * head_bytes
            copy_row(BITS, value, head_bytes // VECTOR_BYTES, values + i * call.head)
        ready = own.copied + row * own.num_copied * (call.group + 2) * head_bytes
        for i in range(own.num_copied * (call.group + 2)):
            out, key = queries + (num_queries + i) * head_bytes, i - own.num_copied * call.group
            if key >= own.num_copied:
                out = values + (num_keys + key - own.num_copied) * call.head
            elif key >= 0:
                out = keys + (num_keys + key) * call.head
            copy_row(BITS, ready + i * head_bytes, head_bytes // VECTOR_BYTES, out)
