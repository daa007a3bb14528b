"""Packed linear layers: the same products, taken only where they are faster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specextend.decoding import layers as packing
from specextend.decoding.layers import CompiledLinear, PackedLinear, fastest, linear_forms, pack_if_faster

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


class Timed(nn.Module):
    """A layer that takes as long as it is told."""

    def __init__(self, clock: list[float], few_s: float, many_s: float) -> None:
        super().__init__()
        self._clock, self._few_s, self._many_s = clock, few_s, many_s

    def forward(self, x: Tensor) -> Tensor:
        self._clock[0] += self._few_s if x.shape[1] < 100 else self._many_s
        return x


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"torch": (2.0, 10.0), "onednn": (1.0, 10.0)}, "onednn"),
        ({"torch": (1.0, 10.0), "onednn": (2.0, 10.0)}, "torch"),
        ({"torch": (3.0, 11.0), "onednn": (2.0, 10.0), "compiled": (1.0, 10.5)}, "compiled"),
        ({"torch": (3.0, 11.0), "onednn": (2.0, 5.0), "compiled": (1.0, 10.0)}, "onednn"),
    ],
)
def test_the_form_that_is_fastest_for_few_rows_is_taken_unless_prompts_pay_for_it(seconds, expected):
    """With matrix units, oneDNN reads prompts much faster than a kernel without them."""
    clock = [0.0]
    forms = {name: lambda _, each=each: Timed(clock, *each) for name, each in seconds.items()}
    assert fastest([layer()], forms, lambda: clock[0]) == expected


@needs_bf16
@pytest.mark.parametrize("name", ["torch", "onednn", "compiled"])
def test_a_module_keeps_its_results_in_every_form(name, monkeypatch):
    """Whatever a layer's sizes are: the compiled kernel takes the first and the last layer only."""
    if name not in linear_forms():
        pytest.skip("the compiled kernel needs numba and a processor with avx512_bf16")
    torch.manual_seed(0)
    layers = [layer(64, 64, bias=True), nn.SiLU(), nn.Sequential(layer(40, 64), layer(128, 40))]
    module, x = nn.Sequential(*layers), torch.randn(5, 64).bfloat16()
    expected = module(x)
    monkeypatch.setattr(packing, "fastest", lambda linears, forms: name)
    assert pack_if_faster(module) == name
    kinds = {"torch": (nn.Linear,) * 3, "onednn": (PackedLinear,) * 3}
    kinds["compiled"] = (CompiledLinear, PackedLinear, CompiledLinear)
    assert tuple(type(each) for each in (module[0], *module[2])) == kinds[name]
    torch.testing.assert_close(module(x), expected, atol=1e-2, rtol=1.6e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_left_alone(dtype):
    """Only bf16 is reordered in every call."""
    module = nn.Sequential(nn.Linear(8, 8, dtype=dtype))
    assert pack_if_faster(module) == "torch"
    assert isinstance(module[0], nn.Linear)
