"""The CUDA kernels, for `scripts/gpu_check.sh`; until it has passed, `auto` does not choose sdpa on a GPU."""

import pytest
import torch

from specextend.attention.torch_kernels import attend_cuda, attend_cudnn
from specextend.decoding.sampling import gumbel_noise, noise_keys
from specextend.proof.child import wrong_layer
from tests.attention.calls import assert_is_the_reference, assert_near, attend_tree_slowly, tree_call
from tests.attention.layer_calls import HEADS, layer_shape, product_in_fp8
from tests.covering import covering

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["prefix", "causal", "own", "tree"])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 2), (32, 8)])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_sdpa_equals_the_reference_on_cuda(dtype, error, heads, kind):
    """The kernels have other traps than the CPU's: fewer key heads than query heads, mask alignment, padded LSE."""
    lengths = [17, 17] if kind == "own" else [300, 77]
    how = {"num_masked": 17} if kind == "tree" else {"causal": kind in ("causal", "own")}
    assert_is_the_reference(attend_cuda, lengths, 17, heads, 64, dtype, error, device="cuda", **how)


@pytest.mark.parametrize("before", [0, 1024])
def test_cudnn_equals_the_reference_on_cuda(before):
    """Keys lie apart by the length of the cache, and query heads share them."""
    how = 512, (32, 8), 128, torch.bfloat16, 2e-2
    assert_is_the_reference(attend_cudnn, [before + 512], *how, causal=True, device="cuda")


TREE_CALLS = covering(
    [64, 128],
    [(2, 2), (9, 3), (8, 2), (32, 8), (14, 2)],
    [1, 17, 51, 128],
    [[0], [16000], [65, 0, 1000], [0, 1, 2, 63, 64, 65, 127, 300]],
    ["tree", "level", "last level", "none"],
    [torch.bfloat16, torch.float16, torch.float32],
    [1, 3, 27, 64],
)


@pytest.mark.parametrize("head_dim, heads, num_queries, prefixes, kind, dtype, num_splits", TREE_CALLS)
def test_the_triton_kernel_equals_its_twin_on_cuda(head_dim, heads, num_queries, prefixes, kind, dtype, num_splits):
    """On a CPU it was only interpreted, without bfloat16 and without tensor cores."""
    kernel = pytest.importorskip("specextend.attention.tree_kernel", exc_type=ImportError)
    call = [
        argument.cuda() if isinstance(argument, torch.Tensor) else argument
        for argument in tree_call(head_dim, heads, num_queries, prefixes, kind, dtype)
    ]
    out, lse = kernel.attend_tree(*call, num_splits)
    expected_out, expected_lse = attend_tree_slowly(*call)
    assert_near(out, expected_out, {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype])
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-4)


LAYER_CALLS = covering(
    [1, 51, 2048],
    [192, 4096, 16384],
    HEADS,
    [64, 128, 24],
    [True, False],
    [torch.float32, torch.float16, torch.bfloat16],
)


@pytest.mark.parametrize("num_rows, size, heads, head_dim, norms, dtype", LAYER_CALLS)
def test_the_kernels_of_a_layer_equal_their_twins_on_cuda(num_rows, size, heads, head_dim, norms, dtype):
    """On a CPU they were only interpreted, without bfloat16."""
    kernels = pytest.importorskip("specextend.attention.layer_kernels", exc_type=ImportError)
    with torch.device("cuda"):
        assert not wrong_layer(kernels.TRITON, num_rows, layer_shape(size, heads, head_dim, norms), dtype)


def test_a_product_in_fp8_is_right_on_cuda():
    """On a CPU its kernel was only interpreted."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products in fp8")
    kernels = pytest.importorskip("specextend.attention.layer_kernels", exc_type=ImportError)
    linear, x, expected = product_in_fp8("cuda")
    assert_near(kernels.multiply(linear, x).float(), expected, 1e-2)


def test_a_product_in_int8_is_right_on_cuda():
    """With more rows than cuBLAS takes at least, and with fewer."""
    kernels = pytest.importorskip("specextend.attention.layer_kernels", exc_type=ImportError)
    with torch.device("cuda"):
        for num_rows in (1, 16, 33, 1000):
            shape = layer_shape(576, (9, 3), 64, False)
            assert not wrong_layer(kernels.TRITON, num_rows, shape, torch.bfloat16, scheme="int8")


def test_noise_is_the_same_on_every_device():
    """A seed must give the same summary on a laptop and on a cluster, up to the rounding of logits."""
    positions = torch.tensor([0, 1, 5000])
    token_ids = torch.arange(4096)
    expected = gumbel_noise(noise_keys([7], positions[None]), token_ids)
    found = gumbel_noise(noise_keys([7], positions[None].cuda()), token_ids.cuda())
    assert_near(found.cpu(), expected, 1e-6)
