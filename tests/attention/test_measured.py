"""The choice of an attention kernel: measured in turns, looked up for each call, the same attention whatever it is."""

from __future__ import annotations

import torch

from specextend.attention.backends import attend_reference, cpu_kernels
from specextend.attention.measured import MeasuredAttention, measure_attention
from specextend.attention.plan import KeySpan

CELLS = [(False, 1, 64), (False, 16, 64), (False, 16, 256), (True, 16, 64), (True, 16, 256)]


class Clock:
    """A clock that only kernels move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def kernel(self, seconds):
        """A kernel that takes `seconds(masked, T, S)`."""

        def attend(q, k, v, span, scale):
            self.now += seconds(span.mask is not None, q.shape[1], span.lengths[0])
            return q, q

        return attend


def stored() -> torch.Tensor:
    return torch.zeros(3, 2, 2, 256, 32)


def test_each_call_gets_the_kernel_that_was_fastest_for_it():
    """One kernel has a high price for a call, the other for each key; a mask doubles the first."""
    clock = Clock()
    kernels = {
        "call": clock.kernel(lambda masked, t, s: 100.0 * (1 + masked)),
        "key": clock.kernel(lambda masked, t, s: t * s / 16),
    }
    choices = measure_attention(stored(), 4, kernels, CELLS, clock)
    assert choices == dict(zip(CELLS, ["key", "key", "call", "key", "call"], strict=True))


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
