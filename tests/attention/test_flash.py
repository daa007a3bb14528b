"""flash-attn without a GPU: stand-ins with the signatures of its versions 2 and 3, which say what may be passed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specextend.attention.backends import attend_reference, load_backend
from specextend.attention.flash import attend_with, find_flash_attn
from specextend.attention.plan import KeySpan
from tests.attention.calls import random_mask, regions, tensors
from tests.covering import covering


def flash_attn_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Version 2.8, whose third result is for tests of dropout."""
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return *varlen(q, k, v, *ends, softmax_scale, causal, return_attn_probs), None


def flash_attn_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """Version 3, as of hopper/flash_attn_interface.py."""
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen(q, k, v, *ends, softmax_scale, causal, return_attn_probs)


def varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, scale, causal, return_lse) -> tuple[Tensor, Tensor]:
    """Each sequence by itself; a causal mask is aligned at the bottom right."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert return_lse
    assert (longest_q, longest_k) == (ends_q.diff().max(), ends_k.diff().max())
    assert (ends_q[-1], ends_k[-1]) == (len(q), len(k))
    results = []
    for b in range(len(ends_q) - 1):
        own_q, own_k = slice(*ends_q[b : b + 2].tolist()), slice(*ends_k[b : b + 2].tolist())
        num_keys = own_k.stop - own_k.start
        keys, values = (x[own_k].transpose(0, 1) for x in (k, v))
        results.append(attend_reference(q[None, own_q], keys, values, KeySpan([0], [num_keys], causal=causal), scale))
    out, lse = (torch.cat([result[part][0] for result in results]) for part in (0, 1))
    return out, lse.T.contiguous()


@pytest.mark.parametrize(
    ("kernel", "kind", "lengths", "dtype", "heads"),
    covering(
        [flash_attn_2, flash_attn_3],
        ["prefix", "causal", "tree"],
        [[40], [300, 77], [17, 0, 41]],
        [torch.bfloat16, torch.float16, torch.float32],
        [(4, 4), (8, 2)],
    ),
)
def test_it_is_the_reference(kernel, kind, lengths, dtype, heads):
    """Whatever the package takes goes to it, and trees, float32 and empty sequences to the other kernel."""
    lengths = [length + 17 for length in lengths] if kind == "causal" else lengths
    starts, num_rows = regions(lengths)
    q, k, v = tensors(len(lengths), 17, heads, num_rows, 64, dtype)
    mask = random_mask(len(lengths), 17, 17) if kind == "tree" else None
    others = []

    def otherwise(*call):
        others.append(kind)
        return attend_reference(*call)

    span = KeySpan(starts, lengths, mask, causal=kind == "causal")
    found = attend_with(kernel, otherwise)(q, k, v, span, 0.125)
    expected = attend_reference(q, k, v, KeySpan(starts, lengths, mask, causal=kind == "causal"), 0.125)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    assert bool(others) == (kind == "tree" or dtype == torch.float32 or 0 in lengths)


@pytest.mark.parametrize(("modules", "version"), [("23", 3), ("2", 2), ("3", 3), ("", None)])
def test_version_3_is_taken_where_there_is_one(modules, version, monkeypatch):
    """Its module has another name, and both may be installed."""
    kernels = {"2": ("flash_attn", flash_attn_2), "3": ("flash_attn_interface", flash_attn_3)}
    for number, (name, kernel) in kernels.items():
        module = ModuleType(name)
        module.flash_attn_varlen_func = kernel
        monkeypatch.setitem(sys.modules, name, module if number in modules else None)
    assert find_flash_attn() is (None if version is None else kernels[str(version)][1])
    if version is None:
        message = r"^attention\.backend flash needs the flash extra: pip install .*$"
    else:
        message = r"^attention\.backend flash runs on a GPU only; choose auto$"
    with pytest.raises(ValueError, match=message):
        load_backend("flash", torch.device("cpu"))


def test_chunks_of_a_prompt_take_it_beside_the_triton_kernel(monkeypatch):
    """The kernel of our own takes trees; a chunk has more queries than it has room for."""
    pytest.importorskip("specextend.attention.tree_kernel", exc_type=ImportError)
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_2
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    q, k, v = tensors(1, 200, (8, 2), 400, 64, torch.bfloat16)
    found = load_backend("triton", torch.device("cuda"))(q, k, v, KeySpan([5], [300], causal=True), 0.125)
    expected = attend_reference(q, k, v, KeySpan([5], [300], causal=True), 0.125)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
