"""A kernel is right if its results are those of fp32 but for a rounding, however many keys there are."""

from dataclasses import replace

import pytest
import torch

from specextend.attention.backends import load_backend
from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan
from specextend.attention.torch_kernels import TORCH, attend_by_head, gate
from specextend.proof.trials import (
    Call,
    Heads,
    prompt_calls,
    step_calls,
    what_is_wrong,
    what_is_wrong_in_a_layer,
)

CALLS = [*step_calls(8, 4, 4, 700), *prompt_calls(100, 300)]
DTYPES = (torch.float32, torch.bfloat16)


def heads(dtype):
    return Heads(4, 2, 64, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernel", [attend_reference, attend_by_head, load_backend("compiled", heads(DTYPES[0]).device)]
)
def test_kernels_of_a_cpu_are_right(kernel, dtype):
    """In a cache whose other rows are NaN, so that reading one of those would show."""
    assert not [wrong for call in CALLS if (wrong := what_is_wrong(kernel, call, heads(dtype), 4096))]


LONG = 16_300


def lost_split(q, k, v, span, scale):
    """A kernel that loses one of 32 splits."""
    first = span.lengths[0] // 2
    other = first + span.lengths[0] // 32
    lost = torch.zeros(len(q), q.shape[1], span.lengths[0], dtype=torch.bool)
    lost[..., first:other] = True
    return attend_reference(q, k, v, hidden(span, lost), scale)


def a_key_too_few(q, k, v, span, scale):
    """A kernel whose last block of the prefix ends too soon."""
    lost = torch.zeros(len(q), q.shape[1], span.lengths[0], dtype=torch.bool)
    lost[..., span.lengths[0] - 300] = True
    return attend_reference(q, k, v, hidden(span, lost), scale)


def a_wrong_word(q, k, v, span, scale):
    """A kernel that takes the second word of a mask for the first one, of one query."""
    mask = span.mask.clone()
    mask[:, 30, :64] = mask[:, 31, :64]
    return attend_reference(q, k, v, KeySpan(span.starts, span.lengths, mask), scale)


def hidden(span, lost):
    """The span without some rows [B, T, S]."""
    visible = torch.ones_like(lost)
    if span.mask is not None:
        visible[..., -span.mask.shape[2] :] = span.mask
    return KeySpan(span.starts, span.lengths, visible & ~lost)


@pytest.mark.parametrize(
    "kernel, kinds",
    [
        (lost_split, ("plain", "tree")),
        (a_key_too_few, ("plain", "tree")),
        (a_wrong_word, ("tree",)),
        (attend_reference, ()),
        (attend_by_head, ()),
    ],
)
def test_a_fault_behind_sixteen_thousand_keys_is_found(kernel, kinds):
    """In bfloat16 a lost split was less than the roundings that were allowed: results are small there."""
    shape = Heads(16, 4, 64, torch.bfloat16, torch.device("cpu"))
    calls = Call("plain", 1, (LONG,)), Call("tree", 32, (LONG - 31,)), Call("tree", 32, (LONG - 217,), 186)
    found = {call.kind for call in calls if call.kind in (kinds or ("plain", "tree"))}
    wrong = [what_is_wrong(kernel, call, shape, LONG + 512) for call in calls if call.kind in found]
    assert all(wrong) if kinds else not any(wrong)


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
