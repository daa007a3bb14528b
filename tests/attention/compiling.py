"""Triton kernels, compiled for chips that are not there."""

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory that a block of threads may use, by compute capability: A100 and H100."""


def compile_kernel(kernel, types, constants, capability, **options):
    """Compile for a chip that is not there. Pointers and strides are multiples of 16, as in a cache."""
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    aligned = [name for name in signature if signature[name].startswith("*") or name.startswith(("q_", "k_", "v_"))]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assert_fits(compiled, capability, folder):
    """Assert that registers and shared memory suffice, as the tool in triton's wheel says of the machine code."""
    binary = folder / "kernel.cubin"
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    binary.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    assert stack + local == 0, "nothing spills"
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    assert registers < 255, "at the limit the next change spills"
