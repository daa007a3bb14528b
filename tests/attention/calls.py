"""Calls of attention kernels: tensors, sequences in a cache, masks, and products of tiles."""

import numpy as np
import torch

from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan


def assert_near(found, expected, tolerance):
    """Assert that tensors, or pairs of them, are equal but for a relative and an absolute error of so much."""
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def assert_is_the_reference(
    kernel, lengths, num_queries, heads, head_dim, dtype, tolerance, *, num_masked=0, causal=False, window=None
):
    """Assert that a kernel gives what the reference does: for all rows, under a mask of the last ones, or causally."""
    starts, num_rows = regions(lengths)
    call = tensors(len(lengths), num_queries, heads, num_rows, head_dim, dtype)
    mask = random_mask(len(lengths), num_queries, num_masked) if num_masked else None
    found, expected = (
        attend(*call, KeySpan(starts, lengths, mask, causal, window=window), 0.125)
        for attend in (kernel, attend_reference)
    )
    assert_near(found, expected, tolerance)


def tensors(batch, num_queries, heads, num_rows, head_dim, dtype):
    """Queries [B, T, H, D], keys and values [K, R, D]; `heads` is (H, K)."""
    generator = torch.Generator().manual_seed(batch * 1000 + num_queries)
    shapes = [(batch, num_queries, heads[0], head_dim), *[(heads[1], num_rows, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def regions(lengths):
    """First rows of sequences with a gap between them, and all rows."""
    starts = [5]
    for length in lengths:
        starts.append(starts[-1] + length + 3)
    return starts[:-1], starts[-1]


def random_mask(batch, num_queries, num_masked):
    """[B, T, M] in which every query sees its own row."""
    mask = torch.rand(batch, num_queries, num_masked, generator=torch.Generator().manual_seed(7)) < 0.3
    own = torch.arange(num_queries)
    mask[:, own, num_masked - num_queries + own] = True
    return mask


def attend_tree_slowly(q, k, v, starts, lengths, visible, num_masked, scale):
    """The specification of `attend_tree`: of the last `num_masked` rows query t sees those whose bits are set.

    Out is 0 and LSE -inf where no row is visible.
    """
    words = visible.unsqueeze(-1) >> torch.arange(64, device=visible.device)
    mask = (words & 1).bool().flatten(2)[..., :num_masked] if num_masked else None
    return attend_reference(q, k, v, KeySpan([*map(int, starts)], [*map(int, lengths)], mask), scale)


def product_of_tiles(x, weight):
    """Return x [T, I] times weight [O, I], both bf16 widened to float32, as tiles do: [T, O] float32.

    An instruction takes 16 pairs of inputs: it sums their first numbers and their second ones apart, and adds both.
    """
    sums = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], 32):
        halves = np.zeros((2, *sums.shape), np.float32)
        for i in range(first, first + 32):
            halves[i % 2] += np.multiply.outer(x[:, i], weight[:, i])
        sums += halves[0] + halves[1]
    return sums


def product_of_bytes(x, weight, group=64):
    """Return x [T, I] float32, in whose groups numbers are rounded to bytes, times weight [O, I] int8: [T, O] float32.

    A group's sum is one of integers; in long double its scale times it is exact, and the sum of both as good as that.
    """
    groups = x.reshape(len(x), -1, group)
    most = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(2.0**-100))
    rounded = np.rint(groups * (np.float32(127) / most)).astype(np.int64)
    scales = (most / np.float32(127)).astype(np.longdouble)
    sums = np.zeros((len(x), len(weight)), np.float32)
    for i in range(groups.shape[1]):
        integers = rounded[:, i] @ weight[:, i * group : (i + 1) * group].T.astype(np.int64)
        sums = (integers * scales[:, i] + sums).astype(np.float32)
    return sums
