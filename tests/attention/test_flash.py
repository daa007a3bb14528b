"""flash-attn without a GPU: stand-ins that take what its versions 2 and 3 both have in their signatures."""

import sys
from types import ModuleType

import pytest
import torch

from specextend.attention.backends import load_backend
from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan
from specextend.attention.torch_kernels import attend_with, find_flash_attn
from tests.attention.calls import assert_is_the_reference
from tests.covering import covering


def flash_attn_2(q, k_cache, v_cache, *, softmax_scale, causal, return_softmax_lse):
    """Version 2.8, each sequence by itself; a causal mask is aligned at the bottom right."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(3) == k_cache.stride(3) == v_cache.stride(3) == 1
    assert return_softmax_lse
    [key], [value] = k_cache, v_cache
    span = KeySpan([0], [len(key)], causal=causal)
    out, lse = attend_reference(q, key.transpose(0, 1), value.transpose(0, 1), span, softmax_scale)
    return out, lse.transpose(1, 2).contiguous()


def flash_attn_3(*tensors, **options):
    """Version 3, as of hopper/flash_attn_interface.py; it returns more than is asked for."""
    return *flash_attn_2(*tensors, **options), None, None


@pytest.mark.parametrize(
    "kernel, kind, lengths, dtype, heads",
    covering(
        [flash_attn_2, flash_attn_3],
        ["prefix", "causal", "tree"],
        [[40], [300, 77], [17, 0, 41]],
        [torch.bfloat16, torch.float16, torch.float32],
        [(4, 4), (8, 2)],
    ),
)
def test_it_is_the_reference(kernel, kind, lengths, dtype, heads):
    """Whatever the package takes goes to it, and trees and float32 to the other kernel."""
    lengths = [length + 17 for length in lengths] if kind == "causal" else lengths
    others = []

    def otherwise(*call):
        others.append(kind)
        return attend_reference(*call)

    how = {"tree": {"num_masked": 17}, "causal": {"causal": True}}.get(kind, {})
    assert_is_the_reference(attend_with(kernel, otherwise), lengths, 17, heads, 64, dtype, 1e-2, **how)
    assert bool(others) == (kind == "tree" or dtype == torch.float32)


@pytest.mark.parametrize("modules, version", [("23", 3), ("2", 2), ("3", 3), ("", None)])
def test_version_3_is_taken_where_there_is_one(modules, version, monkeypatch):
    """Its module has another name, and both may be installed."""
    kernels = {"2": ("flash_attn", flash_attn_2), "3": ("flash_attn_interface", flash_attn_3)}
    for number, (name, kernel) in kernels.items():
        module = ModuleType(name)
        module.flash_attn_with_kvcache = kernel
        monkeypatch.setitem(sys.modules, name, module if number in modules else None)
    assert find_flash_attn() is (None if version is None else kernels[str(version)][1])
    if version is None:
        message = r"^attention\.backend flash needs the flash extra: pip install .*$"
    else:
        message = r"^attention\.backend flash runs on a GPU only; choose auto$"
    with pytest.raises(ValueError, match=message):
        load_backend("flash", torch.device("cpu"))
