"""The Triton kernel on a CPU, by triton's interpreter: `test_interpreted.py` runs this file with TRITON_INTERPRET=1.

In float16 and float32 only: the interpreter multiplies the bits of bfloat16 as if they were integers.
"""

import pytest
import torch

from specextend.attention.backends import load_backend
from specextend.attention.plain import pack_mask
from specextend.attention.tree_kernel import attend_tree
from tests.attention.calls import (
    assert_is_the_reference,
    assert_near,
    attend_tree_slowly,
    random_mask,
    tensors,
    tree_call,
)
from tests.covering import covering

HEAD_DIMS = [64, 128]
HEADS = [(2, 2), (9, 3), (8, 2), (32, 8), (14, 2)]
PREFIXES = [[0], [1000], [65, 0, 1000], [63, 64, 65], [0, 1, 2, 63, 64, 65, 127, 300]]
NUM_QUERIES = [1, 2, 17, 64, 128]
KINDS = ["tree", "level", "last level", "none"]
NUM_SPLITS = [1, 3, 16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
SMALL = [
    (64, (4, 2), 7, [65, 0], "tree", 3),
    (64, (3, 1), 2, [64, 63], "level", 4),
    (128, (2, 2), 1, [130, 0], "none", 5),
    (64, (4, 2), 7, [500, 65, 447], "last level", 3),
]


def assert_is_its_twin(case, dtype):
    *shape, num_splits = case
    call = tree_call(*shape, dtype)
    out, lse = attend_tree(*call, num_splits)
    expected_out, expected_lse = attend_tree_slowly(*call)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert out.isfinite().all()
    assert_near(out, expected_out, TOLERANCE[dtype])
    assert_near(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", SMALL)
def test_it_is_the_reference(case, dtype):
    """Trees, levels of a tree and plain steps, with NaN around every sequence."""
    assert_is_its_twin(case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(HEAD_DIMS, HEADS, NUM_QUERIES, PREFIXES, KINDS, NUM_SPLITS))
def test_it_is_the_reference_for_any_two_choices(case):
    """Prefixes around the borders of blocks and splits; tiles of rows that hold one query's heads or many queries."""
    assert_is_its_twin(case, torch.float16)


@pytest.mark.parametrize("last_bit", [62, 63, 64, 65, 127, 128, 319, 320])
def test_a_mask_reaches_from_one_word_into_the_next(last_bit):
    """A block of keys begins anywhere in the mask, so its bits come from two words or from the prefix and one."""
    q, k, v = tensors(1, 2, (2, 1), 590, 64, torch.float32)
    mask = torch.zeros(1, 2, 450, dtype=torch.bool)
    mask[0, 0, last_bit] = mask[0, 1, 449] = True
    for length in (450, 481):
        call = (q, k, v, torch.tensor([0]), torch.tensor([length]), pack_mask(mask), 450, 0.125)
        assert_near(attend_tree(*call, 2), attend_tree_slowly(*call), 1e-5)


def test_scores_may_be_large_and_rise():
    """Every block rescales what came before it, every split is rescaled, and nothing overflows."""
    q, k, v = tensors(1, 2, (2, 1), 300, 64, torch.float32)
    k *= torch.linspace(0, 60, 300)[None, :, None]
    call = (q, k, v, torch.tensor([0]), torch.tensor([300]), pack_mask(random_mask(1, 2, 2)), 2, 0.125)
    torch.testing.assert_close(attend_tree(*call, 3), attend_tree_slowly(*call), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "lengths, how",
    [
        ([150, 131], {"num_masked": 6}),
        ([150, 131], {"num_masked": 513}),
        ([150, 0], {}),
        ([150, 131], {"causal": True}),
    ],
)
def test_the_backend_attends_to_any_span(lengths, how):
    """What the kernel takes goes to it, and the rest to torch's kernels."""
    kernel = load_backend("triton", torch.device("cpu"))
    assert_is_the_reference(kernel, lengths, 6, (2, 1), 64, torch.float32, 1e-5, **how)
