"""The Triton kernels, compiled for chips that are not there; `test_interpreted.py` holds them to their twins."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.covering import covering

pytest.importorskip("triton", reason="triton has wheels for Linux only")

import triton
from triton.backends.compiler import GPUTarget

from specextend.attention.triton_kernels import (
    GATED,
    HEADS,
    add_norm_rows,
    attend_splits,
    choose_tiles,
    gate_rows,
    norm_warps,
    quantize_rows,
    rotate_rows,
    scale_rows,
)

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory that a block of threads may use, by compute capability: A100 and H100."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
"""The tool in triton's wheel that says what machine code uses."""


def splits(head_dim, num_rows, element):
    """Attention to a split of the keys, by tiles for so many rows of queries."""
    tiles = choose_tiles(head_dim, num_rows, DTYPES[element])
    types = dict.fromkeys(("q", "k", "v"), f"*{element}") | dict.fromkeys(("part_out", "part_lse"), "*fp32")
    types |= dict.fromkeys(("starts", "lengths", "visible"), "*i64") | {"log2_scale": "fp32"}
    constants = {"GROUP": 4, "HEAD_DIM": head_dim, "ROWS": tiles.rows, "KEYS": tiles.keys}
    return attend_splits, types, constants, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def rotation(head_dim, norms, element):
    names = ("qkv", "cos", "sin", "query_weight", "key_weight", "query", "keys", "values")
    types = dict.fromkeys(names, f"*{element}") | {"rows": "*i64", "eps": "fp32"}
    constants = {"NUM_HEADS": 32, "NUM_KEY_HEADS": 8, "DIM": head_dim, "HALF": triton.next_power_of_2(head_dim // 2)}
    return rotate_rows, types, constants | {"GROUP": HEADS, "HAS_NORMS": norms}, {"num_warps": 1}


def norm(size, element):
    types = dict.fromkeys(("x", "delta", "weight", "total", "normed"), f"*{element}") | {"eps": "fp32"}
    constants = {"BLOCK": triton.next_power_of_2(size), "HAS_DELTA": True}
    return add_norm_rows, types, constants, {"num_warps": norm_warps(size)}


def gate(element):
    return gate_rows, dict.fromkeys(("gate_up", "out"), f"*{element}"), {"BLOCK": GATED}, {}


def rounding(rounded, largest):
    """Rounding of the widest row, the input of a down projection."""
    types = {"x": "*bf16", "rounded": rounded, "scales": "*fp32"}
    return quantize_rows, types, {"BLOCK": 16384, "LARGEST": largest}, {"num_warps": norm_warps(14336)}


def scaling():
    types = {"sums": "*i32", "row_scales": "*fp32", "scales": "*fp32", "bias": "*bf16", "out": "*bf16"}
    return scale_rows, types, {"BLOCK": GATED, "HAS_BIAS": True}, {}


@pytest.mark.parametrize(
    "capability, describe, arguments",
    [
        (80, splits, (128, 204, "bf16")),  # on which 64 keys to a block spilled
        (90, rotation, (128, True, "bf16")),
        (90, norm, (4096, "bf16")),
        (90, gate, ("bf16",)),
        (90, rounding, ("*fp8e4nv", 448)),  # only sm_89 and later have fp8
        (80, rounding, ("*i8", 127)),
        (80, scaling, ()),
        *(
            pytest.param(capability, describe, arguments, marks=pytest.mark.slow)
            for describe, *axes in ((splits, [64, 128], [1, 24, 64, 204]), (rotation, [64, 128, 96], [True, False]))
            for capability, *arguments in covering([80, 90], *axes, [*DTYPES])
        ),
    ],
)
def test_it_compiles_and_fits(capability, describe, arguments, tmp_path, monkeypatch):
    """A row that spills is written and read again, which is what joining the operators saves.

    Products of scalars, in place of tensor cores, would cost more than the kernel saves. Pointers and strides are
    multiples of 16, as in a cache.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))  # no kernel of an earlier run is taken
    kernel, types, constants, options = describe(*arguments)
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    aligned = [name for name in signature if signature[name].startswith("*") or name.startswith(("q_", "k_", "v_"))]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([TOOL, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    assert stack + local == 0, "nothing spills"
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    assert registers < 255, "at the limit the next change spills"
    if describe is splits:
        _, num_rows, element = arguments
        instruction = r"wgmma\.mma_async\S*" if capability == 90 and num_rows >= 64 else r"mma\.sync\S*"
        products = re.findall(instruction, compiled.asm["ptx"])
        assert len(products) >= 2, "scores, and sums of values"
        assert all(element.replace("fp", "f") in product and "f32" in product for product in products)
