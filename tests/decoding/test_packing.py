"""Packed linear layers: the same products, taken only where they are faster."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from specextend.decoding.packing import PackedLinear, pack_if_faster, packing_is_faster

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 kernels for this processor"
)


def layer(rows: int = 96, columns: int = 64, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 70])
def test_a_packed_layer_is_the_layer(num_rows, bias):
    """Packed for sixteen rows, right for any number; accumulation is in fp32, so one rounding may differ."""
    torch.manual_seed(0)
    linear, x = layer(bias=bias), torch.randn(2, num_rows, 64).bfloat16()
    exact = nn.functional.linear(x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
    torch.testing.assert_close(PackedLinear(linear)(x).float(), exact, atol=1e-2, rtol=8e-3)


@needs_bf16
@pytest.mark.parametrize(("packed_s", "plain_s"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_side_is_taken(packed_s, plain_s):
    """The sides take turns, and each run reads the clock twice."""
    steps = itertools.cycle([0.0, packed_s, 0.0, plain_s])
    times = itertools.accumulate(steps)
    assert packing_is_faster([layer()], lambda: next(times)) == (packed_s < plain_s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_left_alone(dtype):
    """Only bf16 is reordered in every call."""
    module = nn.Sequential(nn.Linear(8, 8, dtype=dtype))
    pack_if_faster(module)
    assert isinstance(module[0], nn.Linear)
