"""Calls of attention kernels: tensors, sequences in a cache, masks."""

from __future__ import annotations

import torch
from torch import Tensor


def tensors(
    batch: int, num_queries: int, heads: tuple[int, int], num_rows: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Queries [B, T, H, D], keys and values [K, R, D]; `heads` is (H, K)."""
    generator = torch.Generator().manual_seed(batch * 1000 + num_queries)
    shapes = [(batch, num_queries, heads[0], head_dim), *[(heads[1], num_rows, head_dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def regions(lengths: list[int]) -> tuple[list[int], int]:
    """First rows of sequences with a gap between them, and all rows."""
    starts = [5]
    for length in lengths:
        starts.append(starts[-1] + length + 3)
    return starts[:-1], starts[-1]


def random_mask(batch: int, num_queries: int, num_masked: int) -> Tensor:
    """[B, T, M] in which every query sees its own row."""
    mask = torch.rand(batch, num_queries, num_masked, generator=torch.Generator().manual_seed(7)) < 0.3
    own = torch.arange(num_queries)
    mask[:, own, num_masked - num_queries + own] = True
    return mask
