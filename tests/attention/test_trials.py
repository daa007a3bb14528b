"""A kernel is right if it is at most twice as far from fp32 as plain torch in its own dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specextend.attention.reference import attend_reference
from specextend.attention.torch_kernels import TORCH, attend_by_head, gate
from specextend.attention.trials import (
    Call,
    Heads,
    prompt_calls,
    step_calls,
    what_is_wrong,
    what_is_wrong_in_a_layer,
)

CALLS = [*step_calls(8, 4, 700), *prompt_calls(100, 300)]
DTYPES = (torch.float32, torch.bfloat16)


def heads(dtype):
    return Heads(4, 2, 64, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [attend_reference, attend_by_head])
def test_kernels_of_torch_are_right(kernel, dtype):
    """In a cache whose other rows are NaN, so that reading one of those would show."""
    assert not [wrong for call in CALLS if (wrong := what_is_wrong(kernel, call, heads(dtype), 4096))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_kernel_with_a_large_error_is_wrong(factor, dtype):
    """NaN too, although no comparison with it is true."""

    def kernel(*call):
        out, lse = attend_reference(*call)
        return out * factor, lse

    assert "out differs by" in what_is_wrong(kernel, Call("tree", 5, (70, 0)), heads(dtype), 512)


def test_a_kernel_that_is_right_once_is_wrong():
    """What it leaves behind may change its next result."""
    calls = []

    def kernel(*call):
        out, lse = attend_reference(*call)
        calls.append(call)
        return out / len(calls), lse

    assert what_is_wrong(kernel, Call("plain", 1, (70,)), heads(torch.float32), 512)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_norms", [True, False])
def test_a_wrong_kernel_of_a_layer_is_named(head_norms, dtype):
    """Those of torch are right."""
    sizes = 33, 192, 320
    assert not what_is_wrong_in_a_layer(TORCH, *sizes, heads(dtype), head_norms=head_norms)
    wrong = replace(TORCH, gate=lambda gate_up: gate(gate_up) * 1.1)
    assert "the gate differs by" in what_is_wrong_in_a_layer(wrong, *sizes, heads(dtype), head_norms=head_norms)
