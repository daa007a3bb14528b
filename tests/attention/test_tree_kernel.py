"""The Triton kernel of attention: compiled it fits the chips it is for; `test_interpreted.py` holds it to its twin."""

import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.attention.backends import load_backend
from specextend.attention.plain import MAX_MASKED, pack_mask
from tests.covering import covering

pytest.importorskip("triton", reason="triton has wheels for Linux only")

import triton

from specextend.attention.tree_kernel import (
    MAX_SPLITS,
    MERGED_PARTS,
    attend_splits,
    choose_num_splits,
    choose_tiles,
    merge_splits,
)
from tests.attention.compiling import assert_fits, compile_kernel

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZES = [(64, 1), (64, 24), (64, 64), (64, 204), (128, 1), (128, 24), (128, 64), (128, 204)]
"""Head sizes and numbers of rows, T * G: one for each set of tiles."""


@given(st.lists(st.booleans(), min_size=1, max_size=MAX_MASKED))
def test_packing_puts_row_i_into_bit_i(row):
    """Bit 63 is the sign, and a row beyond the mask is not visible."""
    words = pack_mask(torch.tensor(row)[None, None]).flatten().tolist()
    assert len(words) == -(-len(row) // 64)
    bits = sum(word % (1 << 64) << 64 * place for place, word in enumerate(words))
    assert bits == sum(1 << i for i, seen in enumerate(row) if seen)


@pytest.mark.parametrize(
    "num_programs, num_processors, num_warps, expected",
    [
        (8, 108, 4, 26),
        (8, 132, 4, 32),
        (16, 132, 8, 8),
        (2, 132, 4, 61),
        (264, 132, 4, 1),
        (128, 108, 4, 5),  # Vicuna 7B, four sequences on an A100: one split left 41% of a wave idle
    ],
)
def test_splits_fill_whole_waves(num_programs, num_processors, num_warps, expected):
    """More would only write more partial results; fewer leave multiprocessors idle."""
    assert choose_num_splits(num_programs, num_processors, num_warps) == expected


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


def compile_merge(dtype, head_dim, num_splits, capability):
    types = {"part_out": "*fp32", "part_lse": "*fp32", "out": f"*{TYPES[dtype]}", "lse": "*fp32"}
    padded = triton.next_power_of_2(num_splits)
    constants = {"HEAD_DIM": head_dim, "PADDED": padded, "ROWS": max(1, MERGED_PARTS // padded)}
    return compile_kernel(merge_splits, types, constants, capability)


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


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, num_splits, capability", covering([64, 128], [1, 3, 27, MAX_SPLITS], [80, 90]))
def test_the_merge_fits(head_dim, num_splits, capability, tmp_path):
    assert_fits(compile_merge(torch.bfloat16, head_dim, num_splits, capability), capability, tmp_path)
