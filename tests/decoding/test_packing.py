"""Linear layers whose weights are laid out for the compiled kernel give the same products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specextend.decoding import layers as packing
from specextend.decoding.layers import CompiledLinear, compiled_kernel, pack


def layer(rows: int = 96, columns: int = 64, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.skipif(compiled_kernel() is None, reason="the kernel needs numba and a processor with AVX2")
def test_a_module_keeps_its_results():
    """Whatever a layer's sizes are: the compiled kernel does not take 48 outputs."""
    torch.manual_seed(0)
    module = nn.Sequential(layer(64, 64, bias=True), nn.SiLU(), layer(48, 64))
    x = torch.randn(5, 64).bfloat16()
    expected = module(x)
    pack(module)
    assert [type(each) for each in (module[0], module[2])] == [CompiledLinear, nn.Linear]
    torch.testing.assert_close(module(x), expected, atol=1e-2, rtol=1.6e-2)


def test_who_lacks_the_kernel_is_told_what_to_do(monkeypatch, caplog):
    """Without it a processor that has no products of bf16 reads prompts at a tenth of its speed, silently."""
    monkeypatch.setattr(packing, "compiled_kernel", lambda: None)
    monkeypatch.setattr(packing, "multiplies_bf16", lambda: False)
    module = nn.Sequential(layer(64, 64))
    pack(module)
    assert type(module[0]) is nn.Linear
    [message] = caplog.messages
    assert "[cpu]" in message
    assert "target.dtype: float32" in message
