"""The layers' Triton kernels on a CPU, by triton's interpreter: `test_interpreted.py` runs this file."""

import pytest
import torch

from specextend.attention.layer_kernels import TRITON, multiply
from specextend.decoding.layers import RoundedLinear, linear
from specextend.proof.child import wrong_layer
from tests.attention.calls import assert_near
from tests.attention.layer_calls import HEADS, draw, layer_shape, product_in_fp8
from tests.covering import covering

CASES = covering([1, 5], [192, 1024, 1500], HEADS, [64, 128, 24], [True, False], [torch.float32, torch.float16])


@pytest.mark.parametrize("num_rows, size, heads, head_dim, norms, dtype", CASES)
def test_they_are_their_twins(num_rows, size, heads, head_dim, norms, dtype):
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
