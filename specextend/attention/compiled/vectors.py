"""Vectors of 16 lanes in LLVM IR, for loops that numba cannot vectorise.

A kernel is a Python function that emits instructions; `emitted` makes it callable from compiled
code. Values are llvmlite's: addresses, offsets and counts are i64, and lanes have 32 bits. LLVM
splits vectors for shorter registers.
"""

import hashlib
import inspect
import math
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16
VECTOR_BYTES = 4 * LANES
F32, I64, I32, I16, I8 = (
    ir.FloatType(),
    ir.IntType(64),
    ir.IntType(32),
    ir.IntType(16),
    ir.IntType(8),
)
FLOATS, UNITS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

VERSION = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
"""Hash of all kernels; numba's cache of a kernel only looks at its file."""

EXP2 = (1.0, 0.693146978, 0.240222421, 0.0555073375, 0.00967151296, 0.00132647266)
"""Coefficients of 2^x on [-0.5, 0.5]: exact at 0, relative error 1e-7 elsewhere."""
SHORT_EXP2 = (1.0, 0.69328292, 0.24221063, 0.05500869)
"""Likewise with error 1e-4, for results rounded to bf16, with an error of 2e-3."""


class BFloat(ir.Type):
    """The type bfloat, missing in llvmlite; its values only occur in bitcasts."""

    def _to_string(self):
        return "bfloat"


BFLOAT = BFloat()


def processor_features() -> frozenset[str]:
    """Return the features that numba compiles for, such as `avx512bf16`."""
    chosen = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    features = llvmlite.binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


HAS_BF16 = {"avx512f", "avx512bf16"} <= processor_features()
HAS_SCALES = {"avx512f", "avx512dq"} <= processor_features()
HAS_BYTES = {"avx512f", "avx512vnni"} <= processor_features()
HAS_HALF_BYTES = "avxvnni" in processor_features()
REGISTER_LANES = LANES if "avx512f" in processor_features() else 8


def emitted(returns=types.void) -> Any:
    """Make `emit(b, *values)` a function `f(*values)` of compiled code.

    Values are int64, or float32 if annotated as float. If the first is called `element`, only its
    numba type matters.
    """

    def wrap(emit):
        signature = inspect.signature(emit)
        typed = int("element" in signature.parameters)
        wanted = [
            types.float32 if each.annotation is float else types.int64
            for each in signature.parameters.values()
        ][1 + typed :]

        def definition(typingctx, *given):
            element = given[:typed]

            def generate(context, builder, _, values):
                result = emit(builder, *element, *values[typed:])
                return context.get_dummy_value() if returns == types.void else result

            return returns(*element, *wanted), generate

        definition.__name__ = definition.__qualname__ = emit.__name__
        definition.__signature__ = signature  # type: ignore[attr-defined]
        return intrinsic(definition)

    return wrap


def number(value):
    return ir.Constant(I64, value)


def floats(value):
    return ir.Constant(FLOATS, [ir.Constant(F32, value)] * LANES)


def units(values):
    return ir.Constant(
        ir.VectorType(I32, len(values)), [ir.Constant(I32, value) for value in values]
    )


def address(b, base, *offsets):
    for offset in offsets:
        base = b.add(base, number(offset) if isinstance(offset, int) else offset)
    return base


def times(b, x, n):
    return b.mul(x, number(n))


def nth(b, base, i, size=VECTOR_BYTES):
    return b.add(base, times(b, i, size))


def pointer_to(b, where):
    return b.inttoptr(where, ir.PointerType())


def load(b, where, type_=FLOATS, align=4):
    return b.load(pointer_to(b, where), typ=type_, align=align)


def store(b, value, where, align=4):
    b.store(value, pointer_to(b, where), align=align)


def call(b, returns, name, *arguments):
    """Call a function of LLVM or of the C library."""
    function = b.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(returns, [each.type for each in arguments])
        function = ir.Function(b.module, kind, name=name)
    return b.call(function, arguments)


def prefetch(b, where, cache=1):
    """Prefetch a cache line; invalid addresses do no harm."""
    how = (ir.Constant(I32, n) for n in (0, 4 - cache, 1))
    call(b, ir.VoidType(), "llvm.prefetch.p0", pointer_to(b, where), *how)


def splat(b, scalar):
    empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    return b.shuffle_vector(
        b.insert_element(empty, scalar, ir.Constant(I32, 0)), empty, units([0] * LANES)
    )


def fma(b, x, y, z):
    return call(b, FLOATS, "llvm.fmuladd.v16f32", x, y, z)


def dot_pairs(b, sums, x, y):
    """Add products of bf16 pairs to each lane of `sums` (avx512_bf16)."""
    pairs = (b.bitcast(each, ir.VectorType(BFLOAT, 2 * LANES)) for each in (x, y))
    return call(b, FLOATS, "llvm.x86.avx512bf16.dpbf16ps.512", sums, *pairs)


def dot_bytes(b, sums, x, y):
    """Add the products of four bytes to each lane of `sums`: x unsigned, y signed."""
    if HAS_BYTES:
        return call(b, UNITS, "llvm.x86.avx512.vpdpbusd.512", sums, x, y)
    if HAS_HALF_BYTES:
        return by_halves(b, "llvm.x86.avx512.vpdpbusd.256", sums, x, y)
    eights = ir.Constant(ir.VectorType(I16, 2 * LANES), [ir.Constant(I16, 8)] * (2 * LANES))
    x, y = (b.bitcast(each, eights.type) for each in (x, y))
    evens = b.lshr(b.shl(x, eights), eights), b.ashr(b.shl(y, eights), eights)
    for pairs in (evens, (b.lshr(x, eights), b.ashr(y, eights))):
        sums = b.add(sums, by_halves(b, "llvm.x86.avx2.pmadd.wd", *pairs))
    return sums


def by_halves(b, name, *vectors):
    """Call a function on both halves of vectors."""
    halves = []
    for half in range(2):
        sizes = [each.type.count // 2 for each in vectors]
        lanes = [units(range(half * size, (half + 1) * size)) for size in sizes]
        parts = (b.shuffle_vector(x, x, mask) for x, mask in zip(vectors, lanes, strict=True))
        halves.append(call(b, ir.VectorType(I32, LANES // 2), name, *parts))
    return b.shuffle_vector(*halves, units(range(LANES)))


def to_bf16(b, x):
    """Round a vector to bf16 as i16: to nearest, ties to even."""
    halves = ir.VectorType(I16, LANES)
    if HAS_BF16:
        rounds = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return b.bitcast(call(b, ir.VectorType(BFLOAT, LANES), rounds, x), halves)
    bits = b.bitcast(x, UNITS)
    odd = b.and_(b.lshr(bits, units([16] * LANES)), units([1] * LANES))
    rounded = b.add(b.add(bits, odd), units([0x7FFF] * LANES))
    # NaN stays NaN
    finite = b.select(b.fcmp_ordered("ord", x, x), rounded, units([0x7FC00000] * LANES))
    return b.trunc(b.lshr(finite, units([16] * LANES)), halves)


def pair_of_bf16(b, low, high):
    kind = ir.VectorType(BFLOAT, 2 * LANES)
    rounded = call(b, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", high, low)
    return b.bitcast(rounded, ir.VectorType(I16, 2 * LANES))


def larger(b, x, y):
    """Return the larger of two lanes, and y for NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def across(b, x, join):
    """Reduce the lanes of a vector to a scalar, halves first."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = [(lane + width) % LANES for lane in range(LANES)]
        x = join(b, x, b.shuffle_vector(x, x, units(lanes)))
    return b.extract_element(x, ir.Constant(I32, 0))


def exp2(b, x, coefficients=EXP2):
    """Return 2^x for x <= 0: 0 below -127, NaN for NaN. The relative error is 2e-7."""
    if HAS_SCALES:
        rest = rest_of(b, x)
        return scaled(b, power_of_rest(b, rest, coefficients), b.fsub(x, rest))
    x = larger(b, floats(-127.0), x)
    # rounds to an integer; its low bits become the exponent of the result
    shift = floats(1.5 * 2**23 + 127)
    shifted = b.fadd(x, shift)
    power = b.bitcast(b.shl(b.bitcast(shifted, UNITS), units([23] * LANES)), FLOATS)
    rest = b.fsub(x, b.fsub(shifted, shift))
    return b.fmul(power_of_rest(b, rest, coefficients), power)


def power_of_rest(b, x, coefficients):
    """Return 2^x on [-0.5, 0.5]."""
    result = floats(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = fma(b, result, x, floats(coefficient))
    return result


def rest_of(b, x):
    """Return x minus its nearest integer, 0 for infinity (AVX-512)."""
    how = x, ir.Constant(I32, 0), x, ir.Constant(I16, -1), ir.Constant(I32, 4)
    return call(b, FLOATS, "llvm.x86.avx512.mask.reduce.ps.512", *how)


def scaled(b, x, exponent):
    """Return x times a power of two (AVX-512)."""
    how = x, exponent, x, ir.Constant(I16, -1), ir.Constant(I32, 4)
    return call(b, FLOATS, "llvm.x86.avx512.mask.scalef.ps.512", *how)


def silu(b, x):
    power = exp2(b, b.fmul(larger(b, x, b.fneg(x)), floats(-math.log2(math.e))))  # of -|x|
    above = b.select(b.fcmp_ordered("<", x, floats(0.0)), power, floats(1.0))
    return b.fdiv(b.fmul(x, above), b.fadd(floats(1.0), power))


def transposed(b, rows):
    """Transpose a square of units."""
    rows, size = [*rows], len(rows)
    block = 1
    while block < size:
        lower = units([lane + (size - block if lane & block else 0) for lane in range(size)])
        upper = units([lane + (size if lane & block else block) for lane in range(size)])
        for i in range(size):
            if not i & block:
                pair = rows[i], rows[i + block]
                rows[i] = b.shuffle_vector(*pair, lower)
                rows[i + block] = b.shuffle_vector(*pair, upper)
        block *= 2
    return rows


def repeat(b, count, body, carried=()):
    """Emit a loop of `count` >= 1 rounds.

    `body(index, *carried)` emits a round and returns the new carried values, if any.
    """
    before = b.block
    head = b.append_basic_block("repeat")
    after = b.append_basic_block("done")
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    values = [b.phi(value.type) for value in carried]
    new = list(body(index, *values) or ())
    following = b.add(index, number(1))
    for phi, start, end in zip(
        [index, *values], [number(0), *carried], [following, *new], strict=True
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(end, b.block)
    b.cbranch(b.icmp_signed("<", following, count), head, after)
    b.position_at_end(after)
    return new
