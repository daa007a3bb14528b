"""The Triton kernels on a CPU, by triton's interpreter: `test_interpreted.py` runs this file with TRITON_INTERPRET=1.

In float16 and float32 only: the interpreter multiplies the bits of bfloat16 as if they were integers.
"""

import pytest
import torch

from specextend.attention.backends import load_backend
from specextend.attention.plain import what_is_wrong
from specextend.attention.plan import KeySpan
from specextend.attention.triton_kernels import TRITON, multiply
from specextend.decoding.layers import RoundedLinear, linear
from specextend.proof.child import Call, wrong_attention, wrong_layer
from tests.attention.calls import assert_is_the_reference, assert_near, random_mask, tensors
from tests.attention.layer_calls import HEADS, draw, layer_shape, product_in_fp8
from tests.covering import covering

KERNEL = load_backend("triton", torch.device("cpu"))
PREFIXES = [(0,), (1000,), (65, 0, 1000), (63, 64, 65), (0, 1, 2, 63, 64, 65, 127, 300)]
SIZES = [("plain", 1, 0), ("tree", 2, 40), ("tree", 17, 0), ("tree", 64, 0), ("tree", 64, 386), ("causal", 128, 0)]
"""Kinds of calls, their queries, and rows of earlier levels."""
SMALL = covering(
    [64, 128],
    [(4, 2), (3, 1), (2, 2)],
    [("tree", 7, 0), ("tree", 2, 40), ("plain", 1, 0), ("tree", 7, 443)],
    [(58, 0), (22, 21), (129, 0)],
    strength=1,
)


def wrong_call(head_dim, heads, size, prefixes, dtype):
    kind, num_queries, num_earlier = size
    call = Call(kind, num_queries, prefixes, num_earlier)
    return wrong_attention(KERNEL, [call], layer_shape(64, heads, head_dim, False), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("call", SMALL)
def test_it_is_the_reference(call, dtype):
    """Trees, levels of a tree and plain steps, with NaN around every sequence."""
    assert not wrong_call(*call, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("call", covering([64, 128], [*HEADS, (8, 2)], SIZES, PREFIXES))
def test_it_is_the_reference_for_any_two_choices(call):
    """Prefixes around the borders of blocks and splits; tiles of rows that hold one query's heads or many queries."""
    assert not wrong_call(*call, torch.float16)


@pytest.mark.parametrize("last_bit", [62, 63, 64, 65, 127, 128, 319, 320])
def test_a_mask_reaches_from_one_word_into_the_next(last_bit):
    """A block of keys begins anywhere in the mask, so its bits come from two words or from the prefix and one."""
    mask = torch.zeros(1, 2, 450, dtype=torch.bool)
    mask[0, 0, last_bit] = mask[0, 1, 449] = True
    for length in (450, 481):
        call = tensors(1, 2, (2, 1), 590, 64, torch.float32)
        assert not what_is_wrong(KERNEL, *call, KeySpan([0], [length], mask), 0.125)


def test_scores_may_be_large_and_rise():
    """Every block rescales what came before it, every split is rescaled, and nothing overflows."""
    q, k, v = tensors(1, 2, (2, 1), 300, 64, torch.float32)
    k *= torch.linspace(0, 60, 300)[None, :, None]
    assert not what_is_wrong(KERNEL, q, k, v, KeySpan([0], [300], random_mask(1, 2, 2)), 0.125)


@pytest.mark.parametrize(
    "lengths, how",
    [
        ([150, 7], {"num_masked": 450}),
        ([150, 131], {"num_masked": 513}),
        ([150, 0], {}),
        ([150, 131], {"causal": True}),
    ],
)
def test_the_backend_attends_to_any_span(lengths, how):
    """What the kernel takes goes to it, also under masks of more rows than a sequence has; the rest to torch's."""
    assert_is_the_reference(KERNEL, lengths, 6, (2, 1), 64, torch.float32, 1e-5, **how)


LAYERS = covering([1, 5], [192, 1024, 1500], HEADS, [64, 128, 24], [True, False], [torch.float32, torch.float16])


@pytest.mark.parametrize("num_rows, size, heads, head_dim, norms, dtype", LAYERS)
def test_kernels_of_a_layer_are_their_twins(num_rows, size, heads, head_dim, norms, dtype):
    """Sizes that are no power of two, heads that fill no program, with and without norms of queries and keys."""
    assert not wrong_layer(TRITON, num_rows, layer_shape(size, heads, head_dim, norms), dtype)


def test_a_product_in_fp8_has_a_scale_for_each_row():
    """A document's rows must not depend on its neighbours', and a row of zeros is no division by zero."""
    linear, x, expected = product_in_fp8()
    assert_near(multiply(linear, x).float(), expected, 1e-2)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of NaN, by numpy
@pytest.mark.parametrize("num_rows", [1, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_in_int8_is_its_twins(num_rows, has_bias):
    """With fewer rows than cuBLAS takes, a row of zeros, and more outputs than a program scales."""
    bias = draw(1056, dtype=torch.float16) if has_bias else None
    rounded = RoundedLinear(linear(draw(1056, 96, dtype=torch.float16), bias), 96)
    x = draw(num_rows, 96, dtype=torch.float16)
    x[num_rows // 2 + 1 :] = 0
    assert_near(multiply(rounded, x).float(), rounded(x).float(), 1e-2)
    x[0, 5] = torch.nan
    assert multiply(rounded, x)[0].isnan().all(), "a row of an answer that is refused"
