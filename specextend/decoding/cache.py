"""The KV cache: preallocated rows for many sequences, one contiguous region each.

In offline work the largest length of a sequence is known in advance, so each gets one contiguous region and no paging
is needed. A region is aligned to 256 rows, so that a paged kernel can read it through a page table in order.

Shapes: `L` layers, `R` rows, `K` key heads, `D` head size, `B` sequences, `T` new rows of each, `W` rows of a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256


def aligned(num_rows: int) -> int:
    """Round `num_rows` up to the alignment of regions."""
    return -(-num_rows // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Region:
    """Rows `start` to `start + size` of a cache."""

    start: int
    size: int


class RowAllocator:
    """A free list of contiguous rows, first fit."""

    def __init__(self, num_rows: int) -> None:
        self._free = [Region(0, num_rows)]

    @property
    def num_free(self) -> int:
        """Return the number of free rows, in one piece or more."""
        return sum(region.size for region in self._free)

    def take(self, num_rows: int) -> Region | None:
        """Reserve `num_rows` rows, rounded up to the alignment; return None if no gap is wide enough."""
        size = aligned(num_rows)
        for index, gap in enumerate(self._free):
            if gap.size >= size:
                rest = Region(gap.start + size, gap.size - size)
                self._free[index : index + 1] = [rest] if rest.size else []
                return Region(gap.start, size)
        return None

    def give_back(self, region: Region) -> None:
        """Free a region and join it with the gaps beside it."""
        merged: list[Region] = []
        for gap in sorted([*self._free, region], key=lambda gap: gap.start):
            if merged and merged[-1].start + merged[-1].size == gap.start:
                merged[-1] = Region(merged[-1].start, merged[-1].size + gap.size)
            else:
                assert not merged or merged[-1].start + merged[-1].size < gap.start, "rows given back twice"
                merged.append(gap)
        self._free = merged


class KVCache:
    """Keys and values of every sequence, the heads of a layer one after the other, each with all rows.

    A head's rows are contiguous, so attention reads them as one matrix, without a copy. Rows behind a sequence's
    committed ones are a proposal; `commit` keeps a path of it and forgets the rest.
    """

    def __init__(
        self, num_layers: int, num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_layers, 2, num_heads, aligned(num_rows), head_dim)
        self.stored = torch.empty(shape, dtype=dtype, device=device)
        """[L, 2, K, R, D], keys and values of each layer."""
        self.rows = RowAllocator(shape[3])
        self.regions: dict[int, Region] = {}
        """The rows of each slot, while a sequence has it."""

    @property
    def keys(self) -> Tensor:
        """Return the keys [L, K, R, D] of all layers, which may be written."""
        return self.stored[:, 0]

    @property
    def values(self) -> Tensor:
        """Return the values [L, K, R, D] of all layers, which may be written."""
        return self.stored[:, 1]

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` rows from `source` on to `target`; both are starts of regions, which may overlap.

        Starts of regions are multiples of `ALIGNMENT`, so blocks of so many rows need no buffer if they are copied in
        order.
        """
        if source == target:
            return
        firsts = range(0, count, ALIGNMENT)
        for first in firsts if target < source else reversed(firsts):
            end = min(first + ALIGNMENT, count)
            self.stored[:, :, :, target + first : target + end] = self.stored[:, :, :, source + first : source + end]

    def commit(self, rows: Tensor, paths: Tensor) -> None:
        """Move the rows of each path to the front of the rows [B, T] that a forward wrote behind the committed ones.

        `paths` [B, W] are places among the T, ascending up to the path's end and the place's own number behind it.
        """
        source, target = rows.gather(1, paths).flatten(), rows[:, : paths.shape[1]].flatten()
        self.stored.index_copy_(3, target, self.stored.index_select(3, source))
