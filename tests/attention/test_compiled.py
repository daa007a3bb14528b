"""The kernel that numba compiles, against the plain-torch reference and beside torch's own kernel."""

import math
import sys

import pytest
import torch

from specextend.attention.plan import KeySpan
from tests.attention import calls
from tests.attention.calls import assert_is_the_reference
from tests.covering import covering
from tests.job.conftest import environment, ran

pytest.importorskip("numba", reason="numba is the extra `cpu`")

from specextend.attention.compiled.calls import attend_compiled
from specextend.attention.compiled.vectors import processor_features

SCALE = 0.125
HEADS = [(9, 3), (4, 4), (8, 1)]
HEAD_DIMS = [32, 64, 128]
NUM_QUERIES = [1, 2, 7, 16, 48, 300]
LENGTHS = [[0], [1], [15, 0, 17], [63, 64, 65], [255, 256, 257], [1030], [511, 512, 1100]]
KINDS = {
    "prefix": {},
    "mask": {},
    "causal": {"causal": True},
    "narrow window": {"causal": True, "window": 5},
    "window": {"causal": True, "window": 130},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def tensors(batch, num_queries, heads, num_rows, head_dim=64):
    return calls.tensors(batch, num_queries, heads, num_rows, head_dim, torch.float32)


@pytest.mark.parametrize(
    "num_queries, lengths, heads, head_dim, kind, dtype",
    covering(NUM_QUERIES, LENGTHS, HEADS, HEAD_DIMS, [*KINDS], [*TOLERANCE]),
)
def test_it_is_the_reference(num_queries, lengths, heads, head_dim, kind, dtype):
    """Steps, trees and prefill chunks behind prefixes of all sizes, around the blocks of the kernel."""
    if kind != "prefix":
        lengths = [length + num_queries for length in lengths]
    how = {"num_masked": num_queries} if kind == "mask" else KINDS[kind]
    assert_is_the_reference(attend_compiled, lengths, num_queries, heads, head_dim, dtype, TOLERANCE[dtype], **how)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_query_that_sees_no_key_weighs_nothing(dtype):
    """An empty prefix, and a row of the mask without a key."""
    q, k, v = (x.to(dtype) for x in tensors(2, 3, (4, 2), 40))
    mask = torch.ones(2, 3, 10, dtype=torch.bool)
    mask[1, 2] = False
    out, lse = attend_compiled(q, k, v, KeySpan([0, 7], [0, 10], mask), SCALE)
    sees_none = torch.tensor([[True] * 3, [False, False, True]])
    assert torch.equal(lse == -math.inf, sees_none[..., None].expand_as(lse))
    assert (out[sees_none] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_result_does_not_depend_on_the_call(dtype, restored_threads):
    """A query alone, among others and on more threads: the same bits, so the same token where two nearly tie."""
    q, k, v = (x.to(dtype) for x in tensors(3, 120, (9, 3), 1500))
    places = [0, 200, 100], [1290, 700, 0]
    torch.set_num_threads(1)
    out, lse = attend_compiled(q, k, v, KeySpan(*places), SCALE)
    torch.set_num_threads(2)
    for first, last in [(0, 1), (5, 21), (0, 120)]:
        some, some_lse = attend_compiled(q[:1, first:last], k, v, KeySpan([0], [1290]), SCALE)
        assert torch.equal(some, out[:1, first:last])
        assert torch.equal(some_lse, lse[:1, first:last])


FEATURES = [
    "+avx2,+fma,+sse4.2",
    "+avx512f,+avx512bw,+avx512vl,+avx2,+fma",
    "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16,+avx2,+fma",
    "",
]
"""What other processors have: nothing of bf16, pairs of it without tiles, none of all."""
OF_LAYERS = ["tests/attention/test_linear_kernel.py", "tests/decoding/test_one_call.py"]


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
def test_other_processors_get_the_same_results(features):
    """Without products of bf16 pairs, without AVX-512 and without AVX, other instructions are emitted."""
    missing = {name.removeprefix("+") for name in features.split(",") if name} - processor_features()
    if missing:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    other = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    files = [__file__, *(OF_LAYERS if features == FEATURES[0] else [])]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "not slow", "-p", "no:cacheprovider", *files]
    said = ran(*command, env=environment() | other).exits(0).stdout
    assert "the kernel needs a processor with AVX2" not in said, "made for this processor, it is wrong there"
