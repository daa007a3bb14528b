"""Triton kernels, compiled for chips that are not there."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory that a block of threads may use, by compute capability: A100 and H100."""


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int):
    """Compile for a chip that is not there, whose shared memory it must fit.

    Pointers and strides are multiples of 16, as in a cache.
    """
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    aligned = [name for name in signature if signature[name].startswith("*") or name.startswith(("q_", "k_", "v_"))]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    return compiled
