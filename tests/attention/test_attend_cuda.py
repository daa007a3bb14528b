"""What `sdpa` asks of torch's CUDA kernels, without a GPU: stand-ins with their contracts."""

import math

import pytest
import torch

from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan
from specextend.attention.torch_kernels import PLANNED, attend_cuda, attend_cudnn
from tests.attention.calls import assert_is_the_reference
from tests.covering import covering

GROUPS = [(8, 2), (32, 8), (4, 4)]


def plain(q, k, v, bias, *, causal, scale):
    """Attend with q [1, H, T, D] to k, v [1, K, S, D]."""
    mask = None if bias is None else bias[:, 0] == 0
    span = KeySpan([0], [k.shape[2]], mask, causal)
    out, lse = attend_reference(q.transpose(1, 2), k[0], v[0], span, scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    """Takes fewer key heads than query heads, no mask and no float32."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[1] % k.shape[1] == 0
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1
    nothing = torch.empty(0)
    out, lse = plain(q, k, v, None, causal=causal, scale=scale)
    return out, lse, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def efficient(q, k, v, bias, compute_lse, dropout=0.0, causal=False, *, scale=None):
    """Takes as many key heads as query heads and an aligned bias; pads the LSE to a multiple of 32 queries."""
    assert compute_lse
    assert q.shape[1] == k.shape[1] == v.shape[1]
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(2) % 16 == 0
    out, lse = plain(q, k, v, bias, causal=causal, scale=scale)
    return out, torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf), torch.empty(0), torch.empty(0)


def cudnn(q, k, v, bias, compute_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
    """Is only asked for sizes that come again, since it plans anew for each; the LSE has one more dimension."""
    assert compute_lse
    assert bias is None
    assert q.shape[2] % PLANNED == k.shape[2] % PLANNED == 0
    out, lse, *others = flash(q, k, v, dropout, causal, debug, scale=scale)
    return out, lse.unsqueeze(-1), *others


@pytest.fixture
def _stand_ins():
    """Implementations for a CPU, for the duration of a test."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize(
    "heads, how, lengths, dtype_and_error",
    covering(
        GROUPS,
        [{}, {"num_masked": 40}, {"causal": True}],
        [[300, 77], [17, 40], [41, 17]],
        [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
    ),
)
def test_the_parts_merge_to_the_reference(heads, how, lengths, dtype_and_error):
    """Prefix and masked rows go to different kernels; a sequence may have no prefix, or fewer rows than the mask."""
    assert_is_the_reference(attend_cuda, lengths, 17, heads, 64, *dtype_and_error, **how)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("before", [0, PLANNED, PLANNED + 65])
@pytest.mark.parametrize("num_queries", [PLANNED, PLANNED + 8])
def test_cudnn_attends_to_whole_chunks_and_flash_to_others(num_queries, before):
    """A prompt's last chunk has any length, and one that took rows over from another any prefix."""
    how = num_queries, (4, 2), 64, torch.bfloat16, 2e-2
    assert_is_the_reference(attend_cudnn, [before + num_queries], *how, causal=True)
