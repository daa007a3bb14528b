"""Products with the weight of a linear layer in bf16, compiled by numba for processors with avx512_bf16.

The weight is laid out once, in blocks of `BLOCK` outputs whose inputs stand in pairs. An item of work is a block of up
to `ROWS` rows of x. They are multiplied with `DEPTH` pairs of inputs at a time, a part of the weight that stays in a
core's cache meanwhile, so few rows read the weight from memory once. Sums are fp32.

The result for a row is bitwise the same whatever other rows are in the call and however many threads there are.

numba is the extra `cpu`: import this module only where it is installed.

Shapes: `T` rows, `I` inputs, `O` outputs.
"""

from __future__ import annotations

import hashlib
import struct
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba.core import types
from numba.core.errors import NumbaError
from torch import Tensor

from specextend.attention.compiled import blocks
from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.attend import num_workers, run_on
from specextend.attention.compiled.blocks import TILE, add_to, copy_row, product
from specextend.attention.compiled.vectors import LANES, VECTOR_BYTES, Value, address, emitted, load, store

VECTORS = 4
"""Vectors of outputs in a block."""
BLOCK = VECTORS * LANES
"""Outputs of a block."""
ROWS = 96
"""Rows of an item at most; a multiple of TILE."""
DEPTH = 1024
"""Pairs of inputs whose weights are read for all rows of an item before the next ones: 256 KiB of a block."""
_ELEMENT = np.uint32
_SUM_BYTES = VECTORS * VECTOR_BYTES


class LinearCall(NamedTuple):
    """One call's tensors by address, and its sizes."""

    x: int
    weight: int
    bias: int
    """[O] fp32."""
    out: int
    num_rows: int
    num_pairs: int
    """I / 2"""
    num_blocks: int
    counters: int
    """int64, 0 at first: workers, items begun."""
    workspace: int
    """Sums of ROWS rows for each worker."""


RECORD = np.dtype([(name, np.int64) for name in LinearCall._fields])
LAYOUT = struct.Struct(f"={len(LinearCall._fields)}q")
"""A `RECORD`'s bytes."""


@emitted()
def round_sums(b: Value, element: Any, sums: Value, out: Value) -> None:
    """Write a row's sums of a block as bf16."""
    for i in range(VECTORS):
        value = vir.to_bf16_fast(b, load(b, address(b, sums, i * VECTOR_BYTES)))
        store(b, value, address(b, out, i * VECTOR_BYTES // 2), 2)


@numba.njit
def multiply_rows(element: Any, call: Any, sums: int, block: int, first: int, num_rows: int) -> None:
    """Multiply some rows with a block of the weight."""
    row_bytes, weight = call.num_pairs * 4, call.weight + block * call.num_pairs * _SUM_BYTES
    for row in range(num_rows):
        copy_row(element, call.bias + block * _SUM_BYTES, VECTORS, sums + row * _SUM_BYTES)
    for start in range(0, call.num_pairs, DEPTH):
        depth = min(DEPTH, call.num_pairs - start)
        for row in range(0, num_rows, TILE):
            product(
                element, min(TILE, num_rows - row), VECTORS,
                call.x + (first + row) * row_bytes + start * 4, row_bytes, weight + start * _SUM_BYTES, _SUM_BYTES,
                depth, sums + row * _SUM_BYTES, _SUM_BYTES, 1,
            )  # fmt: skip
    for row in range(num_rows):
        place = ((first + row) * call.num_blocks + block) * (_SUM_BYTES // 2)
        round_sums(element, sums + row * _SUM_BYTES, call.out + place)


@numba.njit
def work(element: Any, call: Any) -> None:
    """Take items until none is left. Every worker of a call runs this once."""
    sums = call.workspace + add_to(element, call.counters, 1) * ROWS * _SUM_BYTES
    parts = (call.num_rows + ROWS - 1) // ROWS
    at_once = TILE if call.num_pairs <= DEPTH else ROWS  # a tile's sums take less of a core's first cache
    number = add_to(element, call.counters + 8, 1)
    while number < call.num_blocks * parts:
        block, part = divmod(number, parts)
        end = min(call.num_rows, (part + 1) * ROWS)
        for first in range(part * ROWS, end, at_once):
            multiply_rows(element, call, sums, block, first, min(at_once, end - first))
        number = add_to(element, call.counters + 8, 1)


@cache
def kernel() -> Any:
    """Compile `work`, or read it from numba's cache on disk: a function of a `RECORD`'s address."""
    sources = [Path(file).read_bytes() for file in (__file__, blocks.__file__, vir.__file__)]
    version = (_ELEMENT(0), hashlib.sha256(b"".join(sources)).hexdigest())  # numba caches by this file alone

    @numba.cfunc(types.void(types.CPointer(numba.from_dtype(RECORD))), cache=True)
    def entry(call: Any) -> None:
        work(version[0], numba.carray(call, 1)[0])

    return entry


def can_multiply() -> bool:
    """Compile the kernel, or read it from disk, and try it.

    Returns False if this processor has no avx512_bf16, numba cannot make the kernel, or its products are wrong.
    """
    if not {"avx512f", "avx512bf16"} <= vir.processor_features():
        return False
    try:
        kernel()
    except (NumbaError, OSError, RuntimeError):
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 70), (BLOCK, 70), (BLOCK,)))
    found = multiply(x, lay_out(weight), bias.float()).float()
    return torch.allclose(found, x.float() @ weight.float().T + bias.float(), atol=0.02, rtol=0.01)


def takes(weight: Tensor) -> bool:
    """Return True if the kernel multiplies with a weight [O, I] of this shape and type."""
    return weight.dtype == torch.bfloat16 and weight.shape[0] % BLOCK == 0 and weight.shape[1] % 2 == 0


def lay_out(weight: Tensor) -> Tensor:
    """Copy a weight [O, I] that the kernel takes to [O / BLOCK, I / 2, BLOCK, 2]."""
    assert takes(weight)
    return weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, 2)).transpose(1, 2).contiguous()


def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x [..., I] times a weight that is laid out, plus bias [O] fp32, as [..., O]; x is bf16.

    It runs on as many threads as torch.
    """
    num_blocks, num_pairs = weight.shape[:2]
    x = x.contiguous()
    num_rows = x.numel() // (2 * num_pairs)
    out = torch.empty(*x.shape[:-1], num_blocks * BLOCK, dtype=x.dtype)
    threads = num_workers()
    counters = torch.zeros(2, dtype=torch.int64)
    workspace = torch.empty(threads * ROWS * BLOCK)
    record = LAYOUT.pack(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), num_rows, num_pairs, num_blocks,
        counters.data_ptr(), workspace.data_ptr(),
    )  # fmt: skip
    run_on(threads, kernel(), record)
    return out
