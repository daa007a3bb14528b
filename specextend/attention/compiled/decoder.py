"""All decoder layers of a forward in one call, compiled by numba for processors with AVX2 or more.

A layer is eight *phases*, such as a product or attention, and a phase is a number of items. Workers take items of a
phase until none is left and wait until all are done, so one that is held up delays the others by its item alone. They
wait without the processor after a while: beside another busy process it may be what the one that is held up waits for.

The result for a row is bitwise the same whatever other rows are in the call and however many threads there are.

numba is the extra `cpu`: import this module only where it is installed.

Shapes: `L` layers, `R` rows (the new tokens of all sequences), `C` hidden size, `I` intermediate size, `H` query heads,
`K` key heads, `S` cache rows, `D` head size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.core.errors import NumbaError
from torch import Tensor

from specextend.attention.compiled import attend, blocks, items, products
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.blocks import add_to, copy_row, load_units, times
from specextend.attention.compiled.vectors import FLOATS, LANES, VECTOR_BYTES, Value, address, emitted, store
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


def load_wide(b: Value, where: Value) -> Value:
    """Read 16 numbers of bf16 as fp32."""
    return b.bitcast(load_units(b, types.uint16, where), FLOATS)


@emitted()
def normalise(b: Value, element: Any, x: Value, weight: Value, num_vectors: Value, eps: float, out: Value) -> None:
    """Write the RMSNorm of a row of bf16."""

    def at(base: Value, i: Value) -> Value:
        return address(b, base, times(b, i, VECTOR_BYTES // 2))

    def add_square(i: Value, total: Value) -> list[Value]:
        value = load_wide(b, at(x, i))
        return [vir.fma(b, value, value, total)]

    [squares] = vir.repeat(b, num_vectors, [vir.floats(0.0)], add_square)
    mean = b.fdiv(vir.across(b, squares, blocks.add), b.sitofp(times(b, num_vectors, LANES), vir.F32))
    root = b.call(vir.declared(b, ir.FunctionType(vir.F32, [vir.F32]), "llvm.sqrt.f32"), [b.fadd(mean, eps)])
    factor = vir.splat(b, b.fdiv(ir.Constant(vir.F32, 1.0), root))

    def scale(i: Value) -> None:
        value = b.fmul(b.fmul(load_wide(b, at(x, i)), factor), load_wide(b, at(weight, i)))
        store(b, vir.to_bf16(b, value), at(out, i), 2)

    vir.repeat(b, num_vectors, [], scale)


@emitted()
def turn(b: Value, element: Any, head: Value, cos: Value, sin: Value, num_vectors: Value, out: Value) -> None:
    """Apply RoPE to a head, whose halves have `num_vectors` each; `out` may be the head."""
    half = times(b, num_vectors, VECTOR_BYTES // 2)

    def body(i: Value) -> None:
        low = times(b, i, VECTOR_BYTES // 2)
        high = b.add(low, half)
        x, y = (load_wide(b, address(b, head, offset)) for offset in (low, high))
        for value, other, offset in ((x, y, low), (y, x, high)):
            factors = (load_wide(b, address(b, each, offset)) for each in (cos, sin))
            turned = vir.fma(b, value, next(factors), b.fmul(other, next(factors)))
            store(b, vir.to_bf16(b, turned), address(b, out, offset), 2)

    vir.repeat(b, num_vectors, [], body)


@emitted(types.int64)
def look_at(b: Value, element: Any, counter: Value) -> Value:
    """Read a counter that other threads add to, after a pause."""
    b.call(vir.declared(b, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), [])
    return b.load_atomic(b.inttoptr(counter, ir.PointerType()), "acquire", 8, typ=vir.I64)


@emitted()
def give_way(b: Value, element: Any) -> None:
    """Let another thread have the processor."""
    b.call(vir.declared(b, ir.FunctionType(vir.I32, []), "sched_yield"), [])


@numba.njit
def wait_for(element: Any, counter: int, count: int) -> None:
    """Wait until a counter is `count`."""
    looks = 0
    while look_at(element, counter) < count:
        looks += 1
        if looks > SPINS:
            give_way(element)


@numba.njit
def normalise_rows(element: Any, layer: Any, call: Any, source: int, weight: int, number: int) -> None:
    """Write the norm of an item's rows of `source` as what `call` multiplies."""
    row_bytes = 4 * call.num_pairs
    for row in range(number * ROWS, min(call.num_rows, (number + 1) * ROWS)):
        place = row * row_bytes
        normalise(element, source + place, weight, 2 * call.num_pairs // LANES, layer.own.eps, call.x + place)


@numba.njit
def rotate_rows(element: Any, layer: Any, number: int) -> None:
    """Apply RoPE to an item's queries and keys, and write keys and values to the cache."""
    own, call, num_keys = layer.own, layer.attention, layer.attention.num_key_heads
    head_bytes, num_turned = 2 * call.head_dim, num_keys * (call.group + 1)
    for row in range(number * ROWS, min(layer.qkv.num_rows, (number + 1) * ROWS)):
        place = blocks.get(element, own.rows + 8 * row)
        first, angles = layer.qkv.out + row * (num_turned + num_keys) * head_bytes, row * head_bytes
        for i in range(num_turned):
            head, out, norm = first + i * head_bytes, first + i * head_bytes, own.query_norm
            if i >= num_turned - num_keys:
                out, norm = call.k + (i - num_turned + num_keys) * call.k_head + place * call.k_row, own.key_norm
            if norm != 0:
                normalise(element, head, norm, call.head_dim // LANES, own.eps, head)
            turn(element, head, own.cos + angles, own.sin + angles, call.head_dim // (2 * LANES), out)
        for i in range(num_keys):
            value = first + (num_turned + i) * head_bytes
            out = call.v + i * call.v_head + place * call.v_row
            copy_row(_BITS, value, head_bytes // VECTOR_BYTES, out)


@numba.njit
def count_items(layer: Any, phase: int) -> int:
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
def run_item(element: Any, layer: Any, phase: int, sums: int, scratch: Any, number: int) -> None:
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
def work(element: Any, layers: Any) -> None:
    """Take items of all phases in order. Every worker of a call runs this once."""
    counter = layers[0].own.counters
    worker = add_to(element, counter, 1)
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


@cache
def kernel() -> Any:
    """Compile `work`, or read it from numba's cache on disk: a function of the address of a `RECORD` for each layer."""
    files = __file__, blocks.__file__, items.__file__, products.__file__, vir.__file__
    sources = [Path(file).read_bytes() for file in files]
    version = (attend.ELEMENTS[torch.bfloat16](0), hashlib.sha256(b"".join(sources)).hexdigest())

    @numba.cfunc(types.void(types.CPointer(numba.from_dtype(RECORD))), cache=True)  # which caches by this file alone
    def entry(call: Any) -> None:
        work(version[0], numba.carray(call, numba.carray(call, 1)[0].own.num_layers))

    return entry


def can_compile(head_dim: int) -> bool:
    """Compile the kernel, or read it from disk; return False if numba cannot make it or it takes no such heads."""
    if not attend.serves(head_dim, torch.bfloat16):
        return False
    try:
        kernel()
    except (NumbaError, OSError, RuntimeError):
        return False
    return True


class Decoder:
    """The layers of a model, with their addresses."""

    def __init__(self, layers: Sequence[Any], scale: float) -> None:
        """Take layers as `decoding.layers.FusedLayer`, whose products the kernel of `products` multiplies."""
        self._layers, self._scale = layers, scale
        self._calls = np.zeros(len(layers), RECORD)
        for layer, call in zip(layers, self._calls, strict=True):
            own, norms = call["own"], layer.head_norms
            own["input_norm"], own["post_norm"] = (x.weight.data_ptr() for x in (layer.input_norm, layer.post_norm))
            own["eps"], own["num_layers"] = layer.input_norm.eps, len(layers)
            if norms is not None:
                own["query_norm"], own["key_norm"] = norms.query.data_ptr(), norms.key.data_ptr()
            for name in _PRODUCTS:
                linear = getattr(layer, name)
                product = call[name]
                product["weight"], product["scales"] = linear.packed.data_ptr(), linear.scales.data_ptr()
                product["bias"], product["is_int8"] = linear.bias.data_ptr(), linear.packed.dtype == torch.int8
                product["num_blocks"], product["num_pairs"] = products.sizes(linear.packed)
        self._calls["gate_up"]["is_gated"] = 1

    def run(
        self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, stored: Tensor, kept: Collection[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run x [R, C], cos and sin [R, D], with a plan of one span, and write its rows to the cache [L, 2, K, S, D].

        Returns the output, and those of the layers `kept`. Everything is contiguous and bf16.
        """
        [span], calls, num_rows = plan.spans, self._calls.copy(), len(x)
        widths = {name: calls[name]["num_blocks"][0] * products.BLOCK for name in ("qkv", "gate_up")}
        normed, middle, out = (torch.empty_like(x) for _ in range(3))
        gated = x.new_empty(num_rows, widths["gate_up"] // 2)
        projected = [x.new_empty(num_rows, widths["qkv"])] * len(calls)
        for index in plan.keep_layers:
            projected[index] = torch.empty_like(projected[0])
        outputs = [torch.empty_like(x) if index in kept else out for index in range(len(calls))]
        heads = [qkv.view(len(plan.lengths), plan.num_new, -1, stored.shape[-1]) for qkv in projected]
        num_heads = heads[0].shape[2] - 2 * stored.shape[2]
        queries = [each[:, :, :num_heads] for each in heads]
        plan.queries.update({index: queries[index] for index in plan.keep_layers})
        mixed = torch.empty(queries[0].shape, dtype=x.dtype)
        lse = torch.empty(mixed.shape[:3])

        keys, values = stored[0]
        shares = attend.share(len(plan.lengths), len(keys), plan.num_new * num_heads // len(keys), max(span.lengths))
        described = attend.describe(queries[0], keys, values, mixed, lse, span, self._scale, shares)
        finished = torch.zeros(len(calls), 2 + shares.num_groups, dtype=torch.int64)
        counters = torch.zeros(1 + 2 * NUM_PHASES * len(calls), LINE // 8, dtype=torch.int64)
        workspace = torch.empty(shares.num_workers * products.WORKER_BYTES, dtype=torch.uint8)
        rows = plan.new_rows(x.device).flatten()

        attention = calls["attention"]
        attention[:] = np.array((*described, 0), items.RECORD)
        steps = np.arange(len(calls))
        attention["k"] += steps * stored.stride(0) * 2
        attention["v"] += steps * stored.stride(0) * 2
        attention["counters"] = finished.data_ptr() + steps * finished.stride(0) * 8
        attention["q"] = [each.data_ptr() for each in projected]
        own = calls["own"]
        own["cos"], own["sin"], own["rows"], own["counters"] = (t.data_ptr() for t in (cos, sin, rows, counters))
        after = [each.data_ptr() for each in outputs]
        before = [x.data_ptr(), *after[:-1]]
        middles, norms = middle.data_ptr(), normed.data_ptr()
        places = {
            "qkv": (norms, 0, attention["q"]),
            "o_proj": (mixed.data_ptr(), before, middles),
            "gate_up": (norms, 0, gated.data_ptr()),
            "down_proj": (gated.data_ptr(), middles, after),
        }
        for name, (source, residual, target) in places.items():
            call = calls[name]
            call["x"], call["residual"], call["out"], call["num_rows"] = source, residual, target, num_rows
            call["workspace"] = workspace.data_ptr()
        attend.run_on(shares.num_workers, kernel(), calls.tobytes())
        return outputs[-1], [outputs[index] for index in kept]
