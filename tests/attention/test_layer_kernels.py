"""The Triton kernels of a layer: compiled they fit the chips; `test_interpreted.py` holds them to their twins."""

import pytest

from tests.covering import covering

pytest.importorskip("triton", reason="triton has wheels for Linux only")

import triton

from specextend.attention.layer_kernels import (
    GATED,
    HEADS,
    add_norm_rows,
    gate_rows,
    norm_warps,
    quantize_rows,
    rotate_rows,
    scale_rows,
)
from tests.attention.compiling import assert_fits, compile_kernel


def compile_rotation(element, head_dim, norms, capability):
    names = ("qkv", "cos", "sin", "query_weight", "key_weight", "query", "keys", "values")
    types = dict.fromkeys(names, element) | {"rows": "*i64", "eps": "fp32"}
    constants = {"NUM_HEADS": 32, "NUM_KEY_HEADS": 8, "DIM": head_dim, "HALF": triton.next_power_of_2(head_dim // 2)}
    return compile_kernel(rotate_rows, types, constants | {"GROUP": HEADS, "HAS_NORMS": norms}, capability, num_warps=1)


def compile_norm(element, size, capability):
    types = dict.fromkeys(("x", "delta", "weight", "total", "normed"), element) | {"eps": "fp32"}
    constants = {"BLOCK": triton.next_power_of_2(size), "HAS_DELTA": True}
    return compile_kernel(add_norm_rows, types, constants, capability, num_warps=norm_warps(size))


@pytest.mark.parametrize(
    "head_dim, norms, size, capability, element",
    [
        (128, True, 4096, 90, "*bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in covering([64, 128, 96], [True, False], [576, 4096, 16384], [80, 90], ["*bf16", "*fp16"])
        ),
    ],
)
def test_they_compile_and_fit(head_dim, norms, size, capability, element, tmp_path):
    """A row that spills is written and read again, which is what joining the operators saves."""
    assert_fits(compile_rotation(element, head_dim, norms, capability), capability, tmp_path)
    assert_fits(compile_norm(element, size, capability), capability, tmp_path)
    gated = compile_kernel(gate_rows, dict.fromkeys(("gate_up", "out"), element), {"BLOCK": GATED}, capability)
    assert_fits(gated, capability, tmp_path)


@pytest.mark.parametrize("rounded, largest, capability", [("*fp8e4nv", 448, 90), ("*i8", 127, 80)])
def test_rounding_to_8_bits_compiles_and_fits(rounded, largest, capability, tmp_path):
    """The input of a down projection is the widest row; only sm_89 and later have fp8."""
    types = {"x": "*bf16", "rounded": rounded, "scales": "*fp32"}
    constants = {"BLOCK": 16384, "LARGEST": largest}
    compiled = compile_kernel(quantize_rows, types, constants, capability, num_warps=norm_warps(14336))
    assert_fits(compiled, capability, tmp_path)


def test_scaling_sums_of_integers_compiles_and_fits(tmp_path):
    """It reads twice what it writes, and nothing more."""
    types = {"sums": "*i32", "row_scales": "*fp32", "scales": "*fp32", "bias": "*bf16", "out": "*bf16"}
    assert_fits(compile_kernel(scale_rows, types, {"BLOCK": GATED, "HAS_BIAS": True}, 80), 80, tmp_path)
