"""Products of linear layers that numba compiles, against the same in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.covering import covering

pytest.importorskip("numba", reason="numba is the extra `cpu`")

from specextend.attention.compiled import products
from specextend.attention.compiled.products import BLOCK, DEPTH, ROWS, can_multiply, lay_out, multiply
from specextend.attention.compiled.vectors import processor_features

pytestmark = pytest.mark.skipif(
    not {"avx512f", "avx512bf16"} <= processor_features(), reason="the kernel needs a processor with avx512_bf16"
)

NUM_ROWS = [1, 5, 6, 7, 16, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 13]
NUM_INPUTS = [2, 64, 576, 2 * DEPTH, 2 * DEPTH + 2]
NUM_BLOCKS = [1, 2, 9]


def tensors(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, I], weight [O, I] and bias [O] in bf16."""
    torch.manual_seed(num_rows)
    shapes = (num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_blocks", "threads"), covering(NUM_ROWS, NUM_INPUTS, NUM_BLOCKS, [1, 2])
)
def test_it_is_the_product_in_fp32_rounded_once(num_rows, num_inputs, num_blocks, threads, restored_threads):
    """Steps, trees and prompts, around the tiles, the blocks and the parts of long rows."""
    torch.set_num_threads(threads)
    x, weight, bias = tensors(num_rows, num_inputs, num_blocks * BLOCK)
    exact = x.double() @ weight.double().T + bias.double()
    found = multiply(x, lay_out(weight), bias.float())
    assert (found.shape, found.dtype) == (exact.shape, torch.bfloat16)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5 * num_inputs)


def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(restored_threads):
    """A document's tokens depend neither on its neighbours in the batch nor on the machine's cores."""
    x, weight, bias = tensors(ROWS + 20, 2 * DEPTH + 64, 3 * BLOCK)
    laid_out, exact_bias = lay_out(weight), bias.float()
    together = multiply(x, laid_out, exact_bias)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (slice(0, 1), slice(3, 10), slice(ROWS - 1, ROWS + 20)):
            assert torch.equal(multiply(x[rows], laid_out, exact_bias), together[rows])


def test_a_kernel_that_cannot_be_made_or_is_wrong_is_not_offered(monkeypatch):
    """It is tried on the machine before anything is multiplied with it."""
    assert can_multiply()
    with monkeypatch.context() as patch:
        patch.setattr(products, "multiply", lambda x, weight, bias: 1.1 * multiply(x, weight, bias))
        assert not can_multiply()

    def fail() -> None:
        raise RuntimeError("no compiler for this processor")

    monkeypatch.setattr(products, "kernel", fail)
    assert not can_multiply()


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
