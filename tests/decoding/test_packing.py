"""Linear layers whose weights are laid out for the compiled kernel give the same products."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from specextend.decoding import layers as packing
from specextend.decoding.layers import RoundedLinear, pack
from specextend.decoding.quantized import check_quantizable
from tests.attention.calls import product_of_bytes


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


@pytest.mark.parametrize("group", [64, 192])
def test_a_layer_in_8_bits_is_that_of_numpy_with_a_scale_for_each_group_of_a_row_or_for_all_of_it(group):
    """Groups as a CPU has them, a whole row as a GPU; no row depends on its neighbours, whose number is padded."""
    rounded = RoundedLinear(layer(96, 192, bias=True), group)
    x = torch.randn(40, 192).bfloat16()
    x[3] = 0
    x[5, 7] = 1e4
    sums = product_of_bytes(x.float().numpy(), rounded.weight.numpy(), group)
    exact = torch.from_numpy(sums) * rounded.scale.T + rounded.bias
    together = rounded(x)
    torch.testing.assert_close(together.float(), exact, rtol=2**-7, atol=1e-5)
    for num_rows in (1, 16, 17):
        assert torch.equal(rounded(x[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("rows, columns", [(36, 64), (64, 36)])
def test_a_product_that_no_gpu_takes_in_8_bits_is_refused(rows, columns):
    """Its library takes multiples of 8, and says so only when a worker has loaded everything."""
    model = SimpleNamespace(model=SimpleNamespace(layers=nn.ModuleList([layer(rows, columns)])))
    with pytest.raises(ValueError, match=r"int8 takes products in multiples of 8, .*; leave it unset"):
        check_quantizable(model, "int8")
