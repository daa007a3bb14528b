"""flash-attn without a GPU: stand-ins with the signatures of its versions 2 and 3, which say what may be passed."""

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


def flash_attn_2(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Version 2.8."""
    return from_cache(q, k_cache, v_cache, softmax_scale, causal, return_softmax_lse)


def flash_attn_3(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Version 3, as of hopper/flash_attn_interface.py; it returns more than is asked for."""
    results = from_cache(q, k_cache, v_cache, softmax_scale, causal, return_softmax_lse)
    return *results, None, None


def from_cache(q, keys, values, scale, causal, return_lse):
    """Each sequence by itself; a causal mask is aligned at the bottom right."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(3) == keys.stride(3) == values.stride(3) == 1
    assert return_lse
    [key], [value] = keys, values
    span = KeySpan([0], [len(key)], causal=causal)
    out, lse = attend_reference(q, key.transpose(0, 1), value.transpose(0, 1), span, scale)
    return out, lse.transpose(1, 2).contiguous()


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


@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_chunks_of_a_prompt_take_it_where_it_is_installed(backend, monkeypatch):
    """By name, and beside the kernel of our own, for which a chunk has too many queries."""
    pytest.importorskip("triton")
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_2
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    kernel = load_backend(backend, torch.device("cuda"))
    assert_is_the_reference(kernel, [300], 200, (8, 2), 64, torch.bfloat16, 1e-2, causal=True)
