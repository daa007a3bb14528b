"""Products of matrix tiles (AMX) in LLVM IR: 16 rows of bf16 times up to 64 columns, in fp32.

A tile is a register of 16 rows of 64 bytes. An instruction adds the product of rows [16, 32] and
columns [16 pairs, 16, 2] to sums [16, 16]: first and second numbers of pairs separately, with
denormals as zero. Keys, values and weights lie in this layout (`blocks`).

The operating system must allow tiles once per process, and each thread configures and releases
them.
"""

import ctypes

from llvmlite import ir

from specextend.attention.compiled import vectors as vir
from specextend.attention.compiled.vectors import (
    HAS_BF16,
    I8,
    I64,
    VECTOR_BYTES,
    address,
    emitted,
    nth,
    number,
    pointer_to,
    processor_features,
    times,
)

ROWS = 16
PAIRS = 16
"""Pairs of inputs in an instruction."""
_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
_LEFT = 4
"""The tile of rows, after tiles of sums and before tiles of columns."""
_CONFIGURATION = (1, 0, *[0x0040004000400040] * 2, 0, 0, 0x1010101010101010, 0)
"""Palette 1, then bytes per row (64) and rows (16) of each tile, in words of eight bytes."""


def is_allowed():
    """Ask the operating system to allow tiles for all threads; return False if it refuses."""
    if not {"amx-tile", "amx-bf16"} <= processor_features() or not HAS_BF16:
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


HAS_TILES = is_allowed()
INSTRUCTIONS = "AMX" if HAS_TILES else "avx512_bf16" if HAS_BF16 else "AVX2"
OF_BYTES = "avx512_vnni" if vir.HAS_BYTES else "avx_vnni" if vir.HAS_HALF_BYTES else "AVX2"


def _instruct(b, name, *arguments):
    vir.call(b, ir.VoidType(), f"llvm.x86.{name}", *arguments)


def _tile(index):
    return ir.Constant(I8, index)


@emitted()
def configure(b):
    if not HAS_TILES:
        return
    words = b.alloca(ir.ArrayType(I64, len(_CONFIGURATION)))
    b.store(ir.Constant(ir.ArrayType(I64, len(_CONFIGURATION)), _CONFIGURATION), words)
    _instruct(b, "ldtilecfg", b.bitcast(words, ir.PointerType()))


@emitted()
def release(b):
    if HAS_TILES:
        _instruct(b, "tilerelease")


def emit_product(
    b, width, left, left_stride, right, right_stride, right_column,
    depth, sums, sums_stride, accumulate, ahead,
):  # fmt: skip
    """Multiply left [16, depth] pairs by right [depth, width vectors] into `sums`.

    `depth` is a multiple of `PAIRS`. At `ahead`, unless 0, a sixteenth of the columns' size is
    prefetched.
    """
    places = [address(b, sums, column * VECTOR_BYTES) for column in range(width)]
    with b.if_else(b.icmp_signed("!=", accumulate, number(0))) as (keep, replace):
        with keep:
            for column, place in enumerate(places):
                _instruct(b, "tileloadd64", _tile(column), pointer_to(b, place), sums_stride)
        with replace:
            for column in range(width):
                _instruct(b, "tilezero", _tile(column))

    def body(i):
        rows = pointer_to(b, nth(b, left, i))
        _instruct(b, "tileloadd64", _tile(_LEFT), rows, left_stride)
        start = address(b, right, b.mul(times(b, i, PAIRS), right_stride))
        for column in range(width):
            tile = _tile(_LEFT + 1 + column % 3)
            where = address(b, start, b.mul(right_column, number(column)))
            _instruct(b, "tileloadd64", tile, pointer_to(b, where), right_stride)
            _instruct(b, "tdpbf16ps", _tile(column), _tile(_LEFT), tile)
        with b.if_then(b.icmp_signed("!=", ahead, number(0))):
            for column in range(width):
                later = nth(b, ahead, i, width * VECTOR_BYTES)
                vir.prefetch(b, address(b, later, column * VECTOR_BYTES), 2)

    vir.repeat(b, b.udiv(depth, number(PAIRS)), body)
    for column, place in enumerate(places):
        _instruct(b, "tilestored64", _tile(column), pointer_to(b, place), sums_stride)
