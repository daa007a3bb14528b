"""The Triton kernel of attention: compiled it fits the chips it is for; `test_interpreted.py` holds it to its twin."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.attention.backends import attend_reference, load_backend
from specextend.attention.plan import KeySpan
from specextend.attention.tree_reference import attend_tree_reference, pack_mask, unpack_mask
from tests.attention.calls import tree_call
from tests.covering import covering

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from specextend.attention.tree_kernel import attend_splits, choose_tiles
from tests.attention.compiling import compile_kernel

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZES = [(64, 1), (64, 24), (64, 64), (64, 204), (128, 1), (128, 24), (128, 64), (128, 204)]
"""Head sizes and numbers of rows, T * G: one for each set of tiles."""


@pytest.mark.parametrize("kind", ["tree", "none"])
def test_the_twin_is_attention_over_spans(kind):
    """It is what the kernel is held to, so it is held to what every other kernel is."""
    q, k, v, starts, lengths, visible, num_masked, scale = tree_call(64, (9, 3), 7, [30, 0, 2], kind, torch.float32)
    mask = unpack_mask(visible, num_masked) if num_masked else None
    found = attend_tree_reference(q, k, v, starts, lengths, visible, num_masked, scale)
    expected = attend_reference(q, k, v, KeySpan(starts.tolist(), lengths.tolist(), mask), scale)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@given(st.lists(st.booleans(), min_size=1, max_size=128))
def test_packing_puts_row_i_into_bit_i(row):
    """Bit 63 is the sign, and a row beyond the mask is not visible."""
    low, high = pack_mask(torch.tensor(row)[None, None]).flatten().tolist()
    bits = low % (1 << 64) + (high % (1 << 64) << 64)
    assert bits == sum(1 << i for i, seen in enumerate(row) if seen)


def test_without_triton_the_backend_is_refused_in_one_line(monkeypatch):
    """Before a model is loaded, and with what to install."""
    monkeypatch.setitem(sys.modules, "specextend.attention.tree_kernel", None)
    with pytest.raises(ValueError, match=r"^attention\.backend triton needs the package triton: pip install triton$"):
        load_backend("triton", torch.device("cuda"))


def test_on_a_cpu_the_backend_is_refused():
    """Interpreted it would take minutes a token."""
    with pytest.raises(ValueError, match=r"^attention\.backend triton runs on a GPU only; choose auto$"):
        load_backend("triton", torch.device("cpu"))


def compile_splits(dtype: torch.dtype, head_dim: int, num_rows: int, capability: int):
    element, tiles = f"*{TYPES[dtype]}", choose_tiles(head_dim, num_rows, dtype)
    types = dict.fromkeys(("q", "k", "v"), element) | dict.fromkeys(("part_out", "part_lse"), "*fp32")
    types |= dict.fromkeys(("starts", "lengths", "visible"), "*i64") | {"log2_scale": "fp32"}
    constants = {"GROUP": 4, "HEAD_DIM": head_dim, "ROWS": tiles.rows, "KEYS": tiles.keys}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_kernel(attend_splits, types, constants, capability, **options)


@pytest.fixture(autouse=True)
def _own_kernel_cache(tmp_path, monkeypatch):
    """What is tested is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


FITS = covering(SIZES, [80, 90], [*TYPES])


@pytest.mark.parametrize(
    ("size", "capability", "dtype"),
    [((128, 204), 90, torch.bfloat16), *(pytest.param(*case, marks=pytest.mark.slow) for case in FITS)],
)
def test_it_compiles_for_tensor_cores_and_fits(size, capability, dtype):
    """Products of scalars would cost more than the kernel saves."""
    compiled = compile_splits(dtype, *size, capability)
    warpgroup = capability == 90 and size[1] >= 64
    instruction = r"wgmma\.mma_async\S*" if warpgroup else r"mma\.sync\S*"
    products = re.findall(instruction, compiled.asm["ptx"])
    assert len(products) >= 2, "scores, and sums of values"
    assert all(TYPES[dtype].replace("fp", "f") in product and "f32" in product for product in products)
