"""The Triton kernel of attention: compiled it fits the chips it is for; `test_interpreted.py` holds it to its twin."""

import re
import sys

import pytest
import torch

from specextend.attention.backends import load_backend
from tests.covering import covering

pytest.importorskip("triton", reason="triton has wheels for Linux only")


from specextend.attention.tree_kernel import (
    attend_splits,
    choose_tiles,
)
from tests.attention.compiling import assert_fits, compile_kernel

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZES = [(64, 1), (64, 24), (64, 64), (64, 204), (128, 1), (128, 24), (128, 64), (128, 204)]
"""Head sizes and numbers of rows, T * G: one for each set of tiles."""


def test_without_triton_the_backend_is_refused_in_one_line(monkeypatch):
    """Before a model is loaded, and with what to install."""
    monkeypatch.setitem(sys.modules, "specextend.attention.tree_kernel", None)
    with pytest.raises(ValueError, match=r"^attention\.backend triton needs the package triton: pip install triton$"):
        load_backend("triton", torch.device("cuda"))


def test_on_a_cpu_the_backend_is_refused():
    """Interpreted it would take minutes a token."""
    with pytest.raises(ValueError, match=r"^attention\.backend triton runs on a GPU only; choose auto$"):
        load_backend("triton", torch.device("cpu"))


def compile_splits(dtype, head_dim, num_rows, capability):
    element = f"*{TYPES[dtype]}"
    tiles = choose_tiles(head_dim, num_rows, dtype)
    types = dict.fromkeys(("q", "k", "v"), element) | dict.fromkeys(("part_out", "part_lse"), "*fp32")
    types |= dict.fromkeys(("starts", "lengths", "visible"), "*i64") | {"log2_scale": "fp32"}
    constants = {"GROUP": 4, "HEAD_DIM": head_dim, "ROWS": tiles.rows, "KEYS": tiles.keys}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_kernel(attend_splits, types, constants, capability, **options)


FITS = covering(SIZES, [80, 90], [*TYPES])


@pytest.mark.parametrize(
    "size, capability, dtype",
    [
        ((128, 204), 80, torch.bfloat16),  # on which 64 keys to a block spilled
        *(pytest.param(*case, marks=pytest.mark.slow) for case in FITS),
    ],
)
def test_it_compiles_for_tensor_cores_and_fits(size, capability, dtype, tmp_path):
    """Products of scalars or registers in memory would cost more than the kernel saves."""
    compiled = compile_splits(dtype, *size, capability)
    assert_fits(compiled, capability, tmp_path)
    warpgroup = capability == 90 and size[1] >= 64
    instruction = r"wgmma\.mma_async\S*" if warpgroup else r"mma\.sync\S*"
    products = re.findall(instruction, compiled.asm["ptx"])
    assert len(products) >= 2, "scores, and sums of values"
    assert all(TYPES[dtype].replace("fp", "f") in product and "f32" in product for product in products)
