"""All decoder layers of a forward in one call, compiled by numba for processors with AVX2 or more.

A layer is eight *phases*, such as a product or attention, and a phase is a number of items. Workers take items of a
phase until none is left and wait until all are done, so one that is held up delays the others by its item alone. They
wait without the processor after a while: beside another busy process it may be what the one that is held up waits for.

The result for a row is bitwise the same whatever other rows are in the call and however many threads there are.

numba is the extra `cpu`: import this module only where it is installed.

Shapes: `L` layers, `R` rows (the new tokens of all sequences), `C` hidden size, `I` intermediate size, `H` query heads,
`K` key heads, `S` cache rows, `D` head size.
"""

import ctypes
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from specextend.attention.compiled import attend, blocks, items, products, tiles
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import add_to, copy_row, load_units, times
from specextend.attention.compiled.vectors import FLOATS, LANES, VECTOR_BYTES, address, emitted, store
from specextend.attention.plan import AttentionPlan

NUM_PHASES = 8
LINE = 64
"""Bytes of a cache line: what threads count in has one of its own."""
ROWS = 4
"""Rows of an item between products."""
SPINS = 2000
"""Looks at a counter, some tens of microseconds, before a worker that waits gives its processor away."""
_BITS = np.uint32(0)  # an element that is copied as it is
_PAIRS = products.ELEMENT(0)
_PRODUCTS = ("qkv", "o_proj", "gate_up", "down_proj")


class LayerCall(NamedTuple):
    """Hold what stands between the products of a layer, by address, and sizes."""

    input_norm: int
    post_norm: int
    query_norm: int
    """[D]; 0: heads are not normalised."""
    key_norm: int
    cos: int
    """[R, D], as `sin`, whose first half is negative."""
    sin: int
    rows: int
    """[R] int64, the cache rows to write."""
    copied: int
    """[R, heads, D], queries, keys and values that are copied as they are."""
    num_copied: int
    """Key heads among them, the last ones of the cache."""
    num_layers: int
    counters: int
    """int64, 0 at first: workers, and for each phase items begun and items done, a line each."""
    eps: float


RECORD = np.dtype(
    [
        ("own", np.dtype([(name, np.float64 if name == "eps" else np.int64) for name in LayerCall._fields])),
        ("attention", items.RECORD),
        *((name, products.RECORD) for name in _PRODUCTS),
    ]
)


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
def normalise_rows(element, layer, call, source, weight, number):
    """Write the norm of an item's rows of `source` as what `call` multiplies."""
    row_bytes = 4 * call.num_pairs
    for row in range(number * ROWS, min(call.num_rows, (number + 1) * ROWS)):
        place = row * row_bytes
        normalise(element, source + place, weight, 2 * call.num_pairs // LANES, layer.own.eps, call.x + place)


@numba.njit
def rotate_rows(element, layer, number):
    """Apply RoPE to an item's queries and keys, and write keys and values to the cache; copy those of `own.copied`."""
    own, call = layer.own, layer.attention
    head_bytes, num_keys = 2 * call.head_dim, call.num_key_heads - own.num_copied
    num_queries = num_keys * call.group
    for row in range(number * ROWS, min(layer.qkv.num_rows, (number + 1) * ROWS)):
        place, angles = blocks.get(element, own.rows + 8 * row), row * head_bytes
        first = layer.qkv.out + row * (num_queries + 2 * num_keys) * head_bytes
        queries, keys, values = call.q + row * call.q_token, call.k + place * call.k_row, call.v + place * call.v_row
        for i in range(num_queries + num_keys):
            head, out, norm = first + i * head_bytes, queries + i * head_bytes, own.query_norm
            if i >= num_queries:
                out, norm = keys + (i - num_queries) * call.k_head, own.key_norm
            if norm != 0:
                normalise(element, head, norm, call.head_dim // LANES, own.eps, head)
            turn(element, head, own.cos + angles, own.sin + angles, call.head_dim // (2 * LANES), out)
        for i in range(num_keys):
            value = first + (num_queries + num_keys + i) * head_bytes
            copy_row(_BITS, value, head_bytes // VECTOR_BYTES, values + i * call.v_head)
        ready = own.copied + row * own.num_copied * (call.group + 2) * head_bytes
        for i in range(own.num_copied * (call.group + 2)):
            out, key = queries + (num_queries + i) * head_bytes, i - own.num_copied * call.group
            if key >= own.num_copied:
                out = values + (num_keys + key - own.num_copied) * call.v_head
            elif key >= 0:
                out = keys + (num_keys + key) * call.k_head
            copy_row(_BITS, ready + i * head_bytes, head_bytes // VECTOR_BYTES, out)


@numba.njit
def count_items(layer, phase):
    """Return the number of items of a phase."""
    if phase == 1:
        return products.num_items(layer.qkv)
    if phase == 3:
        return items.num_items(layer.attention)
    if phase == 4:
        return products.num_items(layer.o_proj)
    if phase == 6:
        return products.num_items(layer.gate_up)
    if phase == 7:
        return products.num_items(layer.down_proj)
    return (layer.qkv.num_rows + ROWS - 1) // ROWS


@numba.njit
def run_item(element, layer, phase, sums, scratch, number):
    """Do an item of a phase."""
    if phase == 0:
        normalise_rows(element, layer, layer.qkv, layer.o_proj.residual, layer.own.input_norm, number)
    elif phase == 2:
        rotate_rows(element, layer, number)
    elif phase == 3:
        items.run_item(element, layer.attention, scratch, number)
    elif phase == 5:
        normalise_rows(element, layer, layer.gate_up, layer.down_proj.residual, layer.own.post_norm, number)
    else:
        call = layer.down_proj
        if phase == 1:
            call = layer.qkv
        elif phase == 4:
            call = layer.o_proj
        elif phase == 6:
            call = layer.gate_up
        products.run_item(_PAIRS, call, sums, number)


@numba.njit
def work(element, layers):
    """Take items of all phases in order. Every worker of a call runs this once."""
    counter = layers[0].own.counters
    worker = add_to(element, counter, 1)
    tiles.configure(element)
    for index in range(len(layers)):
        layer = layers[index]
        scratch, sums = items.memory_of(layer.attention, worker), layer.qkv.workspace + worker * products.WORKER_BYTES
        for phase in range(NUM_PHASES):
            begun, done, count = counter + LINE, counter + 2 * LINE, count_items(layer, phase)
            number = add_to(element, begun, 1)
            while number < count:
                run_item(element, layer, phase, sums, scratch, number)
                add_to(element, done, 1)
                number = add_to(element, begun, 1)
            wait_for(element, done, count)
            counter = done
    tiles.release(element)


@cache
def kernel():
    """Compile `work`, or read it from numba's cache on disk: a function of the address of a `RECORD` for each layer."""
    version = (attend.ELEMENTS[torch.bfloat16](0), vir.VERSION)

    @numba.cfunc(types.void(types.CPointer(numba.from_dtype(RECORD))), cache=True)  # which caches by this file alone
    def entry(call):
        work(version[0], numba.carray(call, numba.carray(call, 1)[0].own.num_layers))

    return entry


def can_compile(head_dim):
    """Return True if the kernel takes such heads, and numba makes it."""
    return attend.serves(head_dim, torch.bfloat16) and attend.can_make(kernel)


CHAIN = {
    "qkv": ("normed", "", "qkv"),
    "o_proj": ("mixed", "x", "middle"),
    "gate_up": ("normed", "", "gate_up"),
    "down_proj": ("gate_up", "middle", "output"),
}
"""Of each product of a layer, the tensors that it reads, adds and writes."""


def link(calls: Any, chain: Mapping[str, tuple[str, ...]], at: Mapping[str, Any], num_rows: int, workspace: int):
    """Fill the fields by which products follow each other; `at` are addresses, one or one for each layer."""
    for name, places in chain.items():
        product = calls[name]
        for field, place in zip(("x", "residual", "out"), places, strict=True):
            product[field] = at.get(place, 0)
        product["num_rows"], product["workspace"] = num_rows, workspace


def describe_weight(product, linear):
    """Fill the fields of a `products.RECORD` that say what a layer's weight is."""
    product["weight"], product["scales"] = linear.packed.data_ptr(), linear.scales.data_ptr()
    product["bias"], product["is_int8"] = linear.bias.data_ptr(), linear.packed.dtype == torch.int8
    product["num_blocks"], product["num_pairs"] = products.sizes(linear.packed)


class Decoder:
    """The layers of a model, with their addresses."""

    instructions = tiles.INSTRUCTIONS

    def __init__(self, layers: Sequence[Any], scale: float):
        """Take layers as `decoding.layers.FusedLayer`, whose products the kernel of `products` multiplies."""
        self._layers, self._scale = layers, scale
        calls = np.zeros(len(layers), RECORD)
        for layer, call in zip(layers, calls, strict=True):
            own, norms = call["own"], layer.head_norms
            own["input_norm"], own["post_norm"] = (x.weight.data_ptr() for x in (layer.input_norm, layer.post_norm))
            own["eps"], own["num_layers"] = layer.input_norm.eps, len(layers)
            if norms is not None:
                own["query_norm"], own["key_norm"] = norms.query.data_ptr(), norms.key.data_ptr()
            for name in _PRODUCTS:
                describe_weight(call[name], getattr(layer, name))
        calls["gate_up"]["is_gated"] = 1
        self.calls = calls
        """A `RECORD` of each layer, without what a call decides."""
        self._widths = [int(calls[name]["num_blocks"][0]) * products.BLOCK for name in ("qkv", "gate_up")]

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: AttentionPlan,
        stored: Tensor,
        kept: Collection[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run x [R, C], cos and sin [R, D], with a plan of one span, and write its rows to the cache [L, 2, K, S, D].

        Returns the output, and those of the layers `kept`. Everything is contiguous and bf16.
        """
        [span], num_rows, num_layers, batch = plan.spans, len(x), len(self.calls), len(plan.lengths)
        num_keys, head_dim = stored.shape[2], stored.shape[4]
        group = self._widths[0] // head_dim // num_keys - 2
        normed = products.empty_rows(x, *x.shape)
        middle, out = torch.empty_like(x), torch.empty_like(x)
        gated = products.empty_rows(x, num_rows, self._widths[1] // 2)
        projected = [x.new_empty(num_rows, self._widths[0])] * num_layers
        for index in plan.keep_layers:
            projected[index] = torch.empty_like(projected[0])
        outputs = [torch.empty_like(x) if index in kept else out for index in range(num_layers)]
        mixed = products.empty_rows(x, num_rows, num_keys * group * head_dim)
        mixed = mixed.view(batch, plan.num_new, num_keys * group, head_dim)
        rows = plan.new_rows(x.device).flatten()

        def queries_of(index: int) -> Tensor:
            """Return those that a layer has put in front of its keys and values."""
            return projected[index].view(batch, plan.num_new, -1, head_dim)[:, :, : mixed.shape[2]]

        plan.queries.update({index: queries_of(index) for index in plan.keep_layers})
        queries = queries_of(0)
        shares = attend.share(batch, num_keys, plan.num_new * group, max(span.lengths))
        described = attend.describe(queries, stored[0, 0], stored[0, 1], mixed, None, span, self._scale, shares)
        finished = torch.zeros(num_layers, 2 + shares.num_groups, dtype=torch.int64)
        counters = torch.zeros(1 + 2 * NUM_PHASES * num_layers, LINE // 8, dtype=torch.int64)
        workspace = torch.empty(shares.num_workers, products.WORKER_BYTES, dtype=torch.uint8)
        results = [each.data_ptr() for each in outputs]
        made = {"normed": normed, "middle": middle, "gate_up": gated, "mixed": mixed}
        at: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in made.items()}
        at |= {"qkv": [each.data_ptr() for each in projected], "output": results, "x": [x.data_ptr(), *results[:-1]]}
        calls, steps = self.calls.copy(), np.arange(num_layers)
        link(calls, CHAIN, at, num_rows, workspace.data_ptr())
        calls["attention"] = (*described, finished.data_ptr())
        calls["attention"]["q"] = at["qkv"]
        calls["attention"]["counters"] += steps * finished.stride(0) * 8
        for name in ("k", "v"):
            calls["attention"][name] += steps * stored.stride(0) * stored.element_size()
        for name, tensor in {"cos": cos, "sin": sin, "rows": rows, "counters": counters}.items():
            calls["own"][name] = tensor.data_ptr()
        attend.run_on(shares.num_workers, kernel(), ctypes.c_void_p(calls.ctypes.data))
        return outputs[-1], [outputs[index] for index in kept]
