"""Products of linear layers that numba compiles, against the same in fp32, and of bytes against numpy."""

import math

import numpy as np
import pytest
import torch

from tests.attention.calls import assert_near, product_of_bytes, product_of_tiles
from tests.covering import covering

pytest.importorskip("numba", reason="numba is the extra `cpu`")

from specextend.attention.compiled import tiles
from specextend.attention.compiled.calls import Linear, product_of
from specextend.attention.compiled.products import BLOCK, DEPTH, MULTIPLE, ROWS, lay_out
from specextend.attention.compiled.vectors import processor_features

pytestmark = pytest.mark.skipif(not {"avx2", "fma"} <= processor_features(), reason="the kernel needs AVX2")

NUM_ROWS = [1, 5, 6, 7, 16, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 13]
NUM_INPUTS = [MULTIPLE, 64, 576, 2 * DEPTH, 2 * DEPTH + MULTIPLE]
NUM_BLOCKS = [1, 2, 9]
DTYPES = [torch.bfloat16, torch.int8]


def tensors(num_rows, num_inputs, num_outputs, dtype):
    """Return x [T, I] in bf16, weight [O, I] in `dtype`, and scales [O] and bias [O] in fp32."""
    torch.manual_seed(num_rows)
    x, weight, bias = (torch.randn(shape) for shape in ((num_rows, num_inputs), (num_outputs, num_inputs), num_outputs))
    if dtype == torch.int8:
        weight = (40 * weight).clamp(-127, 127)
    return x.bfloat16(), weight.to(dtype), torch.rand(num_outputs), bias


def product(x, *tensors):
    """Multiply with what a weight, its scales and its bias are made of."""
    return Linear(product_of(*tensors)).multiply(x)


@pytest.mark.parametrize(
    "num_rows, num_inputs, num_blocks, threads",
    covering(NUM_ROWS, NUM_INPUTS, NUM_BLOCKS, [1, 2]),
)
def test_it_is_the_product_in_fp32_rounded_once(num_rows, num_inputs, num_blocks, threads, restored_threads):
    """Steps, trees and prompts, around the tiles, the blocks and the parts of long rows."""
    torch.set_num_threads(threads)
    x, weight, scales, bias = tensors(num_rows, num_inputs, num_blocks * BLOCK, torch.bfloat16)
    exact = x.double() @ weight.double().T * scales + bias
    found = product(x, lay_out(weight), scales, bias)
    assert found.shape == exact.shape
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5 * num_inputs)


def unusual_rows(num_rows, num_inputs):
    """Return rows in bf16 of usual numbers, zeros, one size (all saturate), outliers of 1e4, and tiniest numbers."""
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs)
    x[1::5] = 0
    x[2::5] = x[2::5].sign()
    x[3::5, ::37] *= 1e4
    x[4::5] *= 1e-38
    return x.bfloat16()


@pytest.mark.parametrize("num_inputs, threads", [(64, 1), (576, 2), (1536, 7), (64 * 61, 2)])
def test_a_product_of_bytes_is_that_of_numpy_bit_by_bit(num_inputs, threads, restored_threads):
    """For 1 to 40 rows, and many: sums of integers are exact, and scales are added in one order."""
    torch.set_num_threads(threads)
    weight = torch.randint(-127, 128, (2 * BLOCK, num_inputs), dtype=torch.int8)
    weight[0], weight[1] = 127, -127
    scales, bias = torch.rand(2 * BLOCK), torch.randn(2 * BLOCK)
    x = unusual_rows(ROWS + 5, num_inputs)
    sums = product_of_bytes(x.float().numpy(), weight.numpy())
    outputs = sums * scales.numpy().astype(np.longdouble) + bias.numpy()
    expected = torch.from_numpy(outputs.astype(np.float32)).bfloat16()
    laid_out = lay_out(weight)
    for rows in [*range(1, 41), len(x)]:
        assert torch.equal(product(x[-rows:], laid_out, scales, bias), expected[-rows:])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_not_rounded_to_one_that_is(value):
    """Else a broken layer would write text that nobody doubts."""
    x, weight, scales, bias = tensors(3, 128, BLOCK, torch.int8)
    x[1, 70] = value
    found = product(x, lay_out(weight), scales, bias).isfinite().all(-1)
    assert found.tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(dtype, restored_threads):
    """A document's tokens depend neither on its neighbours in the batch nor on the machine's cores."""
    x, weight, scales, bias = tensors(ROWS + 20, 2 * DEPTH + 64, 3 * BLOCK, dtype)
    laid_out = lay_out(weight)
    together = product(x, laid_out, scales, bias)
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        for rows in (slice(0, 1), slice(3, 10), slice(ROWS - 1, ROWS + 20)):
            assert torch.equal(product(x[rows], laid_out, scales, bias), together[rows])


def test_the_twin_of_matrix_tiles_is_the_product():
    """It says, on any processor, in which order tiles are laid out and summed."""
    x, weight, _, _ = tensors(40, 192, 2 * BLOCK, torch.bfloat16)
    found = product_of_tiles(x.float().numpy(), weight.float().numpy())
    assert_near(torch.from_numpy(found).double(), x.double() @ weight.double().T, 1e-4)


@pytest.mark.skipif(not tiles.HAS_TILES, reason="this processor has no matrix tiles (AMX)")
@pytest.mark.parametrize("num_rows", [1, 16, 17, ROWS + 3])
def test_matrix_tiles_do_what_their_twin_does_bit_by_bit(num_rows):
    """For few rows, whose sums stay in tiles, and for many, whose sums wait in memory between two parts."""
    x, weight, _, _ = tensors(num_rows, 2 * DEPTH + 64, BLOCK, torch.bfloat16)
    expected = torch.from_numpy(product_of_tiles(x.float().numpy(), weight.float().numpy()))
    found = product(x, lay_out(weight), torch.ones(BLOCK), torch.zeros(BLOCK))
    assert torch.equal(found, expected.bfloat16())
