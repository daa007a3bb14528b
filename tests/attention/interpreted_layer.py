"""The layers' Triton kernels on a CPU, by triton's interpreter: `test_interpreted.py` runs this file."""

import pytest
import torch

from specextend.attention.layer_kernels import TRITON, multiply, rotate_heads
from specextend.attention.torch_kernels import TORCH
from specextend.proof.checks import wrong_layer
from tests.attention.calls import assert_near
from tests.attention.layer_calls import HEADS, layer_shape, product_in_fp8, rotate_call
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


def test_rows_that_are_not_named_stay_as_they_are():
    """They belong to other sequences; the cache is one of several layers' and its heads lie apart."""
    call, cache = rotate_call(4, (4, 2), 64, norms=False, dtype=torch.float32)
    wide = torch.full((2, 3, 20, 64), 7.0)
    call[4:6] = wide[:, 1:]
    rotate_heads(*call)
    named = torch.zeros(20, dtype=torch.bool)
    named[call[6]] = True
    assert (wide[:, 0] == 7).all()
    assert (wide[:, :, ~named] == 7).all()
    call[4:6] = cache
    TORCH.rotate_heads(*call)
    assert_near(wide[:, 1:, named], cache[:, :, named[:12]], 1e-5)
