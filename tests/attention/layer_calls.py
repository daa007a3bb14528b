"""Calls of the kernels of a layer."""

from types import SimpleNamespace

import torch

from specextend.attention.plain import HeadNorms
from specextend.proof.subject import LayerShape

EPS = 1e-5
HEADS = [(2, 2), (9, 3), (14, 2), (32, 8)]


def draw(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rotate_call(num_rows, heads, head_dim, *, norms, dtype, device="cpu"):
    """The arguments of `rotate_heads`, and the cache [2, K, S, D] that two of them are: rows in no order, with gaps."""
    num_all = heads[0] + 2 * heads[1]
    angles = draw(num_rows, head_dim, dtype=torch.float32) * 3
    weights = [1 + draw(head_dim + n, dtype=dtype)[n:] for n in (0, 1)]
    cache = torch.full((2, heads[1], 3 * num_rows, head_dim), 7.0, dtype=dtype, device=device)
    rows = torch.randperm(3 * num_rows, generator=torch.Generator().manual_seed(0))[:num_rows]
    tensors = draw(num_rows, num_all, head_dim, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)
    head_norms = HeadNorms(*(weight.to(device) for weight in weights), EPS) if norms else None
    return [*(x.to(device) for x in tensors), head_norms, *cache, rows.to(device)], cache


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


def product_in_fp8(device="cpu"):
    """A linear layer as torchao leaves it, rows [5, 96], the third of them zero, and their exact product [5, 32].

    What fp8 holds exactly, times any scale, has to come back: triton's interpreter does not round to it as a GPU does.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw_fp8(*shape):
        numbers = torch.randn(shape, generator=generator, device=device) * 100
        numbers[:, 5] = -448.0
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn)

    qdata, scale, bias = (
        draw_fp8(32, 96),
        torch.arange(1, 33, device=device).unsqueeze(1) / 1e5,
        draw(32, dtype=torch.bfloat16),
    )
    linear = SimpleNamespace(weight=SimpleNamespace(qdata=qdata, scale=scale), bias=bias.to(device))
    x = draw_fp8(5, 96).float() * torch.tensor([1.0, 0.25, 0.0, 2.0, 2.0**-9], device=device).unsqueeze(1)
    return linear, x.bfloat16(), x @ (qdata.float() * scale).T + linear.bias.float()
