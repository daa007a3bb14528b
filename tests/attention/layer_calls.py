"""Calls of the kernels of a layer, and the comparison with their twins."""

import torch

from specextend.attention.plain import HeadNorms
from specextend.attention.torch_kernels import TORCH
from tests.attention.calls import assert_near

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


def outputs(
    kernels, num_rows, size, heads, head_dim, norms,
    dtype, device,
):  # fmt: skip
    """Everything that the three kernels return and write."""
    call, cache = rotate_call(num_rows, heads, head_dim, norms=norms, dtype=dtype, device=device)
    x, delta, gate_up = (draw(num_rows, n, dtype=dtype).to(device) for n in (size, size + 1, 2 * size))
    added = kernels.add_norm(x, delta[:, :size].contiguous(), draw(size, dtype=dtype).to(device), EPS)
    normed = kernels.add_norm(x, None, draw(size, dtype=dtype).to(device), EPS)
    return [kernels.rotate_heads(*call), cache, *added, *normed, kernels.gate(gate_up)]


def assert_are_their_twins(kernels, *case, dtype, device="cpu"):
    error = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}[dtype]
    found, expected = (outputs(each, *case, dtype=dtype, device=device) for each in (kernels, TORCH))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert_near(a, b, error)
