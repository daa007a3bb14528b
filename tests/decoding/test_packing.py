"""Linear layers whose weights are laid out for the compiled kernel give the same products."""

import torch
from torch import nn

from specextend.decoding import layers as packing
from specextend.decoding.layers import pack


def layer(rows=96, columns=64, *, bias=False):
    return nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


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
