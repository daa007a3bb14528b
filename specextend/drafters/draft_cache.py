"""The draft's two caches: every committed token's K and V, and the rows it may see now (arXiv 2505.20776, section 3).

The full cache holds keys rotated back to position 0. The working cache holds the visible ones, rotated to consecutive
positions, so that a draft trained on 2K positions stays in range at 16K. Rotations are computed in fp32 from `inv_freq`
alone; yarn's attention scaling is part of the stored key.

Shapes: `L` layers, `n` tokens, `K` key heads, `D` head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.decoding.cache import KVCache, Region


def rotate(keys: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate keys [..., n, K, D] by RoPE to `positions` [..., n] (negative: back), in fp32; return the keys' dtype.

    inv_freq is [D / 2], or [K, D / 2] if heads differ; a row of zeros leaves its head unchanged.
    """
    angles = positions[..., None, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    first, second = keys.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(keys.dtype)


@dataclass(slots=True)
class _Regions:
    full: Region
    working: Region
    length: int = 0
    """Tokens in the full cache."""
    visible: int = 0
    """Rows in the working cache."""


class DraftCache:
    """Full and working cache of one draft, for many sequences."""

    def __init__(self, working: KVCache, num_full_rows: int, inv_freq: Tensor) -> None:
        """Allocate the full cache beside the `working` one; `rotate` says what `inv_freq` is."""
        num_layers, _, num_heads, _, head_dim = working.stored.shape
        self.working = working
        dtype, device = working.stored.dtype, working.stored.device
        self._full = KVCache(num_layers, num_full_rows, num_heads, head_dim, dtype, device)
        self._inv_freq = inv_freq.float().to(device)
        self._sequences: dict[int, _Regions] = {}

    def admit(self, slot: int, num_tokens: int, num_working_rows: int) -> bool:
        """Reserve a region of each cache; return False, and reserve nothing, if either has no room."""
        assert slot not in self._sequences, f"slot {slot} is in use"
        full = self._full.rows.take(num_tokens)
        working = self.working.rows.take(num_working_rows)
        if full and working:
            self._sequences[slot] = _Regions(full, working)
            return True
        for rows, region in ((self._full.rows, full), (self.working.rows, working)):
            if region is not None:
                rows.give_back(region)
        return False

    def release(self, slot: int) -> None:
        """Free both regions."""
        sequence = self._sequences.pop(slot)
        self._full.rows.give_back(sequence.full)
        self.working.rows.give_back(sequence.working)

    def start(self, slot: int) -> int:
        """Return the first working row of a sequence."""
        return self._sequences[slot].working.start

    def full_end(self, slot: int) -> int:
        """Return the row of the full cache behind a sequence's tokens."""
        sequence = self._sequences[slot]
        return sequence.full.start + sequence.length

    def visible(self, slot: int) -> int:
        """Return the number of rows that the draft sees now; the next token has this position."""
        return self._sequences[slot].visible

    def reach(self, slot: int, num_new: int) -> int:
        """Return the rows in use with `num_new` behind the visible ones; the region must hold them."""
        sequence = self._sequences[slot]
        assert sequence.visible + num_new <= sequence.working.size, "the working cache is full"
        return sequence.visible + num_new

    def length(self, slot: int) -> int:
        """Return the number of tokens in the full cache."""
        return self._sequences[slot].length

    def store(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Append keys [L, n, K, D] at position 0 (before RoPE), and values of the same shape, to the full cache."""
        sequence = self._sequences[slot]
        first = sequence.full.start + sequence.length
        sequence.length += keys.shape[1]
        assert sequence.length <= sequence.full.size, "the full cache is full"
        rows = slice(first, first + keys.shape[1])
        self._full.keys[:, :, rows] = keys.transpose(1, 2)
        self._full.values[:, :, rows] = values.transpose(1, 2)

    def store_working(self, slot: int, offset: int, count: int, position: int) -> None:
        """Append `count` working rows from `offset` on, whose positions begin at `position`, to the full cache."""
        first = self.start(slot) + offset
        rows = slice(first, first + count)
        back = -torch.arange(position, position + count, device=self._inv_freq.device)
        keys, values = (stored[:, :, rows].transpose(1, 2) for stored in (self.working.keys, self.working.values))
        self.store(slot, rotate(keys, back, self._inv_freq), values)

    def keep_last(self, slot: int, offset: int, count: int) -> None:
        """Move `count` working rows from `offset` on to the front, as prefill does when its window slides."""
        first = self.start(slot)
        stored = self.working.stored
        stored[..., first : first + count, :] = stored[..., first + offset : first + offset + count, :].clone()

    def select(self, slot: int, positions: Tensor) -> None:
        """Show the tokens at `positions` [S] that the full cache holds, at positions 0 to S - 1.

        `positions` are ascending and on the host, which has to know how many there are.
        """
        sequence = self._sequences[slot]
        positions = positions[positions < sequence.length]
        count = len(positions)
        assert count <= sequence.working.size, "the working cache is full"
        source = (positions + sequence.full.start).to(self._inv_freq.device)
        rows = slice(sequence.working.start, sequence.working.start + count)
        places = torch.arange(count, device=source.device)
        keys = rotate(self._full.keys[:, :, source].transpose(1, 2), places, self._inv_freq)
        self.working.keys[:, :, rows] = keys.transpose(1, 2)
        self.working.values[:, :, rows] = self._full.values[:, :, source]
        sequence.visible = count

    def write_back(self, rows: Tensor, positions: Tensor, full_rows: Tensor) -> None:
        """Copy working `rows` [n], whose keys are at `positions` [n], to rows [n] of the full cache.

        All int64 on the device. What lies behind a sequence's tokens there, up to the end of its region, is free.
        """
        new = self.working.stored.index_select(3, rows)
        keys = rotate(new[:, 0].transpose(1, 2), -positions, self._inv_freq)
        self._full.stored.index_copy_(3, full_rows, torch.stack([keys.transpose(1, 2), new[:, 1]], 1))

    def advance(self, slot: int, count: int) -> None:
        """Count the first `count` rows behind the visible ones, which were written back, as the sequence's own."""
        sequence = self._sequences[slot]
        sequence.visible += count
        sequence.length += count
        assert sequence.length <= sequence.full.size, "the full cache is full"
