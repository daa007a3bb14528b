"""The CUDA kernels, for `scripts/gpu_check.sh`; until it has passed, `auto` does not choose sdpa on a GPU."""

import pytest
import torch

from specextend.attention.backends import load_backend
from specextend.decoding.sampling import gumbel_noise, noise_keys
from specextend.proof.child import prompt_calls, step_calls, wrong_attention, wrong_layer
from tests.attention.layer_calls import HEADS, layer_shape
from tests.covering import covering

pytestmark = pytest.mark.gpu

CALLS = [*step_calls(16, 4), *step_calls(50, 10), *prompt_calls(17), *prompt_calls(512)]
ATTENTION = covering(
    ["sdpa", "cudnn", "triton"], [64, 128], [*HEADS, (4, 4), (8, 2)], CALLS, [torch.bfloat16, torch.float16]
)
IN_FP32 = covering(["sdpa"], [64], [(4, 4), (9, 3), (32, 8)], CALLS, [torch.float32])


@pytest.mark.parametrize("backend, head_dim, heads, call, dtype", [*ATTENTION, *IN_FP32], ids=str)
def test_attention_is_right_on_cuda(backend, head_dim, heads, call, dtype):
    """Kernels have other traps than the CPU's: fewer key heads than query heads, mask alignment, padded LSE.

    On a CPU that of Triton was only interpreted, without bfloat16 and without tensor cores.
    """
    kernel = load_backend(backend, torch.device("cuda"))
    with torch.device("cuda"):
        assert not wrong_attention(kernel, [call], layer_shape(64, heads, head_dim, False), dtype)


LAYER_CALLS = covering(
    [1, 51, 2048],
    [192, 4096, 16384],
    HEADS,
    [64, 128, 24],
    [True, False],
    [torch.float32, torch.float16, torch.bfloat16],
)
PRODUCTS = [
    (num_rows, 576, (9, 3), 64, False, torch.bfloat16, scheme)
    for num_rows in (1, 16, 33, 1000)
    for scheme in ("int8", "fp8")
]
"""With more rows than cuBLAS takes at least, and with fewer."""


@pytest.mark.parametrize(
    "num_rows, size, heads, head_dim, norms, dtype, scheme", [*((*case, None) for case in LAYER_CALLS), *PRODUCTS]
)
def test_the_kernels_of_a_layer_are_right_on_cuda(num_rows, size, heads, head_dim, norms, dtype, scheme):
    """On a CPU they were only interpreted, without bfloat16."""
    if scheme == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products in fp8")
    kernels = pytest.importorskip("specextend.attention.triton_kernels", exc_type=ImportError)
    with torch.device("cuda"):
        assert not wrong_layer(
            kernels.TRITON, num_rows, layer_shape(size, heads, head_dim, norms), dtype, scheme=scheme
        )


def test_noise_is_the_same_on_every_device():
    """A seed must give the same summary on a laptop and on a cluster, up to the rounding of logits."""
    positions = torch.tensor([0, 1, 5000])
    token_ids = torch.arange(4096)
    expected = gumbel_noise(noise_keys([7], positions[None]), token_ids)
    found = gumbel_noise(noise_keys([7], positions[None].cuda()), token_ids.cuda())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-6)
