"""Calls of the kernels of a layer."""

from types import SimpleNamespace

import torch

from specextend.proof.prover import LayerShape

HEADS = [(2, 2), (9, 3), (14, 2), (32, 8)]


def draw(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def layer_shape(size, heads, head_dim, norms):
    """The shape of a layer whose rows have `size` elements everywhere."""
    return LayerShape(
        num_heads=heads[0],
        num_key_heads=heads[1],
        head_dim=head_dim,
        hidden_size=size,
        intermediate_size=size,
        has_norms=norms,
    )


def product_in_fp8():
    """A linear layer as torchao leaves it, rows [5, 96], the third of them zero, and their exact product [5, 32].

    What fp8 holds exactly, times any scale, has to come back: triton's interpreter does not round to it as a GPU does.
    """
    generator = torch.Generator().manual_seed(0)

    def draw_fp8(*shape):
        numbers = torch.randn(shape, generator=generator) * 100
        numbers[:, 5] = -448.0
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn)

    qdata = draw_fp8(32, 96)
    scale = torch.arange(1, 33).unsqueeze(1) / 1e5
    linear = SimpleNamespace(weight=SimpleNamespace(qdata=qdata, scale=scale), bias=draw(32, dtype=torch.bfloat16))
    x = draw_fp8(5, 96).float() * torch.tensor([1.0, 0.25, 0.0, 2.0, 2.0**-9]).unsqueeze(1)
    return linear, x.bfloat16(), x @ (qdata.float() * scale).T + linear.bias.float()
