"""Packed linear layers give the same products."""

import pytest
import torch
from torch import nn

from specextend.decoding import layers as packing
from specextend.decoding.layers import CompiledLinear, PackedLinear, linear_forms, pack_if_faster, taken_form

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


@pytest.mark.parametrize("name", ["torch", "onednn", "compiled"])
def test_a_module_keeps_its_results_in_every_form(name, monkeypatch):
    """Whatever a layer's sizes are: the compiled kernel takes the first and the last layer only."""
    if name not in linear_forms():
        pytest.skip(f"this processor has no {name} kernel for bf16")
    torch.manual_seed(0)
    layers = [layer(64, 64, bias=True), nn.SiLU(), nn.Sequential(layer(48, 64), layer(128, 48))]
    module, x = nn.Sequential(*layers), torch.randn(5, 64).bfloat16()
    expected = module(x)
    monkeypatch.setattr(packing, "fastest", lambda times: name)
    assert taken_form(pack_if_faster(module)) == name
    kinds = {"torch": (nn.Linear,) * 3, "onednn": (PackedLinear,) * 3}
    other = PackedLinear if "onednn" in linear_forms() else nn.Linear
    kinds["compiled"] = (CompiledLinear, other, CompiledLinear)
    assert tuple(type(each) for each in (module[0], *module[2])) == kinds[name]
    torch.testing.assert_close(module(x), expected, atol=1e-2, rtol=1.6e-2)


def test_who_lacks_the_kernel_is_told_what_to_do(monkeypatch, caplog):
    """Without it a processor that has no products of bf16 reads prompts at a tenth of its speed, silently."""
    monkeypatch.setattr(packing, "compiled_kernel", lambda: None)
    monkeypatch.setattr(packing, "multiplies_bf16", lambda: False)
    assert [*linear_forms.__wrapped__()] == ["torch"]
    [message] = caplog.messages
    assert "[cpu]" in message
    assert "target.dtype: float32" in message
