"""The choice of an attention kernel: the same attention whatever it is."""

from __future__ import annotations

import torch

from specextend.attention.backends import attend_reference, cpu_kernels
from specextend.attention.measured import MeasuredAttention, measure_attention
from specextend.attention.plan import KeySpan

CELLS = [(False, 1, 64), (False, 16, 64), (False, 16, 256), (True, 16, 64), (True, 16, 256)]


def test_measured_attention_is_attention():
    """Whatever was chosen: with the real kernels, over a call of each cell."""
    kernels = cpu_kernels(32, torch.float32)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 2, 2, 300, 32, generator=generator)
    choices = measure_attention(cache, 4, kernels, CELLS)
    attend = MeasuredAttention(kernels, choices)
    for masked, num_queries, num_keys in CELLS:
        q = torch.randn(1, num_queries, 4, 32, generator=generator)
        mask = torch.ones(1, num_queries, num_queries, dtype=torch.bool).tril() if masked else None
        outs = [each(q, *cache[0], KeySpan([7], [num_keys], mask), 0.2) for each in (attend, attend_reference)]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
