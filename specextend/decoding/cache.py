"""The KV caches of the target, and the two caches of a draft.

Offline work knows the largest length of a sequence in advance. So each sequence has a contiguous
region of rows, aligned to 256, and there is no paging.

A draft's working cache holds the visible tokens at consecutive positions, so a draft trained on 2K
positions stays in range at 16K (arXiv 2505.20776, section 3). A head also keeps every committed
token in a full cache, with keys rotated back to position 0. Yarn's attention scaling is part of the
stored key.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.device import upload

ALIGNMENT = 256


def aligned(num_rows: int) -> int:
    """Round `num_rows` up to the alignment of regions."""
    return -(-num_rows // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Region:
    """Rows `start` to `start + size - 1` of a cache."""

    start: int
    size: int


class RowAllocator:
    """Lends contiguous rows from the first sufficient gap."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._taken: list[Region] = []

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return self._num_rows - sum(region.size for region in self._taken)

    @property
    def starts(self) -> set[int]:
        """First rows of lent regions."""
        return {region.start for region in self._taken}

    def take(self, num_rows: int) -> Region | None:
        """Lend `num_rows` rows, rounded up, or return None without such a gap."""
        region = Region(0, aligned(num_rows))
        for index, other in enumerate([*self._taken, Region(self._num_rows, 0)]):
            if other.start - region.start >= region.size:
                self._taken.insert(index, region)
                return region
            region = replace(region, start=other.start + other.size)
        return None

    def give_back(self, region: Region) -> None:
        """Free a lent region."""
        assert region in self._taken, "rows given back twice"
        self._taken.remove(region)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentSizes:
    """Sizes of the cache of layers with a sliding window."""

    window: int
    reading: int
    """Rows for a prompt: a window, a chunk, and spare rows."""
    running: int
    """Rows of a sequence: a window, its output, and a tree."""
    num_sequences: int
    most_new_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows of each layer."""
        return self.reading + self.num_sequences * self.running


class RecentRows:
    """Rows of layers with a sliding window, without rows that no later token sees.

    Prompts are read one at a time, in rows that move to the front when they are full. The last rows
    are copied to the sequence, and stay until the next prompt.
    """

    def __init__(self, sizes: RecentSizes, parts: Sequence[Tensor], rows: RowAllocator):
        """Take the rows `parts` [L, 2, K, R, D], and the `rows` of the other layers.

        The first row of a region there identifies its sequence.
        """
        self.sizes = sizes
        self._parts = parts
        self._rows = rows
        self._reading: int | None = None
        """First row of the sequence whose prompt is read."""
        self._first = 0
        """Position of this row, or of the last prompt's."""
        self._begin = sizes.num_sequences * sizes.running
        self._slots: dict[int, int] = {}
        self._origins: dict[int, int] = {}
        """Row of position 0 by first row; below 0 if it is gone."""
        self.shift = torch.zeros(1, 1, dtype=torch.int64)
        """[B, 1] distance from rows of other layers, for the last forward."""

    def begin(self, start: int, num_tokens: int) -> int:
        """Begin to read a prompt with `num_tokens` in common with the last prompt.

        Return `num_tokens` if their last rows are still there, otherwise 0.
        """
        if self._first and num_tokens < self._first + self.sizes.window:
            num_tokens = 0
            self._first = 0
        self._reading = start
        return num_tokens

    def locate(self, plan: AttentionPlan, device: torch.device) -> None:
        """Set the `recent_starts` of a plan, and make room for the chunk of a prompt."""
        if plan.starts == [self._reading]:
            self._make_room(plan.lengths[0], plan.num_new)
            self._origins[plan.starts[0]] = self._begin - self._first
        plan.recent_starts = [self._origins[start] for start in plan.starts]
        shift = torch.tensor(plan.recent_starts) - torch.tensor(plan.starts)
        self.shift = upload(shift[:, None], device)

    def settle(self, start: int, length: int) -> None:
        """Give a sequence rows for its output, and copy the end of its prompt."""
        taken = self._rows.starts
        self._slots = {row: slot for row, slot in self._slots.items() if row in taken}
        first = max(self._first, length - self.sizes.window)
        target = self._take_slot(start, first)
        source = self._begin + first - self._first
        copy_rows(self._parts, source, target, length - first)
        self._reading = None

    def assume(self, starts: Sequence[int], length: int) -> None:
        """Count tokens as read, see `CachedModel.assume_read`."""
        self._slots = {}
        for start in starts:
            self._take_slot(start, max(0, length - self.sizes.window))

    def _take_slot(self, start: int, first: int) -> int:
        free = {*range(self.sizes.num_sequences)}.difference(self._slots.values())
        slot = self._slots.setdefault(start, min(free, default=0))
        row = slot * self.sizes.running
        self._origins[start] = row - first
        return row

    def _make_room(self, length: int, num_new: int) -> None:
        first = aligned(length - self.sizes.reading)
        if first > self._first:
            source = self._begin + first - self._first
            copy_rows(self._parts, source, self._begin, length - num_new - first)
            self._first = first


def copy_rows(parts: Sequence[Tensor], source: int, target: int, count: int) -> None:
    """Copy `count` rows of keys and values [..., R, D] from row `source` on to `target`.

    Both may overlap at a distance of a multiple of `ALIGNMENT`: blocks of this size are copied in
    order.
    """
    if source == target:
        return
    firsts = range(0, count, ALIGNMENT)
    for first in firsts if target < source else reversed(firsts):
        end = min(first + ALIGNMENT, count)
        for part in parts:
            part[..., target + first : target + end, :] = part[
                ..., source + first : source + end, :
            ]


class KVCache:
    """Keys and values of all sequences.

    The rows of a head are contiguous, so attention reads them as a matrix. Rows after the committed
    rows are a proposal; `commit` keeps a path of it.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        recent: RecentSizes | None = None,
        windowed: Collection[int] = (),
    ):
        """Allocate the rows of all layers.

        Args:
            shapes: Key heads and head size of each layer; (0, 0) for a layer without attention.
            num_rows: Rows of each layer, to be aligned.
            dtype: Type of keys and values.
            device: Their device.
            recent: Sizes of the `windowed` layers; None: they have `num_rows` too.
            windowed: Numbers of layers with a window.
        """
        self.num_rows = aligned(num_rows)
        forgets = [recent is not None and layer in windowed for layer in range(len(shapes))]
        kinds = [*zip(shapes, forgets, strict=True)]
        of_kind = {
            (shape, is_recent): torch.empty(
                (
                    kinds.count((shape, is_recent)),
                    2,
                    shape[0],
                    recent.num_rows if recent and is_recent else self.num_rows,
                    shape[1],
                ),
                dtype=dtype,
                device=device,
            )
            for shape, is_recent in dict.fromkeys(kinds)
        }
        self.parts = [*of_kind.values()]
        """[L, 2, K, R, D] of all layers of the same kind."""
        each = {kind: iter(part) for kind, part in of_kind.items()}
        self.layers: list[Tensor] = [next(each[kind]) for kind in kinds]
        """[2, K, R, D] of each layer."""
        self.rows = RowAllocator(self.num_rows)
        self._whole = [part for (_, is_recent), part in of_kind.items() if not is_recent]
        self._recent = [part for (_, is_recent), part in of_kind.items() if is_recent]
        self.recent = RecentRows(recent, self._recent, self.rows) if recent else None
        """None: these layers have `num_rows` too."""

    @property
    def stored(self) -> Tensor:
        """Keys and values [L, 2, K, R, D] of layers with equal shapes."""
        [stored] = self.parts
        return stored

    @property
    def keys(self) -> Tensor:
        """The keys [L, K, R, D], also for writing."""
        return self.stored[:, 0]

    @property
    def values(self) -> Tensor:
        """The values [L, K, R, D], also for writing."""
        return self.stored[:, 1]

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` rows of layers without a window."""
        copy_rows(self._whole, source, target, count)

    def commit(self, rows: Tensor, paths: Tensor) -> None:
        """Move the rows of accepted paths to the front of the last forward's rows.

        Args:
            rows: New rows [B, T] of that forward.
            paths: Places [B, W] of the path among the T, then each place's number.
        """
        of_recent = rows if self.recent is None else rows + self.recent.shift
        for parts, places in ((self._whole, rows), (self._recent, of_recent)):
            source = places.gather(1, paths).flatten()
            target = places[:, : paths.shape[1]].flatten()
            for part in parts:
                part.index_copy_(3, target, part.index_select(3, source))


def rotate(keys: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate keys by RoPE, computed in fp32.

    Args:
        keys: [..., n, K, D].
        positions: [..., n]; negative positions rotate back.
        inv_freq: [D / 2], or [K, D / 2] if heads differ. A row of zeros leaves its head unchanged.
    """
    angles = positions[..., None, None].float() * inv_freq
    cos = angles.cos()
    sin = angles.sin()
    first, second = keys.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(keys.dtype)


@dataclass(slots=True)
class DraftRows:
    """Rows of a sequence in the caches of a draft."""

    working: Region
    full: Region = Region(0, 0)
    length: int = 0
    visible: int = 0
    """Rows in the working cache, and the next token's position."""
    pending: Tensor | None = None
    """Features [1, F] of a chunk's last token, until the next token is known."""

    @property
    def full_end(self) -> int:
        """The full cache's next row."""
        return self.full.start + self.length

    def reach(self, num_new: int) -> int:
        """Return the rows in use with `num_new` more."""
        assert self.visible + num_new <= self.working.size, "the working cache is full"
        return self.visible + num_new


class VisibleCache(ABC):
    """The working cache of a draft, by slot."""

    def __init__(self, working: KVCache):
        self.working = working
        self.of: dict[int, DraftRows] = {}

    def admit(self, slot: int, num_tokens: int, num_working_rows: int) -> bool:
        """Reserve rows for a sequence.

        Args:
            slot: Free slot.
            num_tokens: Most tokens of the sequence.
            num_working_rows: Most visible tokens.

        Returns:
            False, with nothing reserved, if there is no room now.

        Raises:
            ValueError: The cache is too small even if it is empty.
        """
        assert slot not in self.of, f"slot {slot} is in use"
        if num_working_rows > self.working.num_rows:
            raise ValueError(
                "the draft's cache has no room for so many new tokens; raise "
                "decoding.max_new_tokens"
            )
        if (working := self.working.rows.take(num_working_rows)) is None:
            return False
        self.of[slot] = DraftRows(working)
        return True

    def release(self, slot: int) -> None:
        """Free the rows of a slot."""
        self.working.rows.give_back(self.of.pop(slot).working)

    @abstractmethod
    def select(self, slot: int, positions: Tensor) -> None:
        """Make the tokens at `positions` [S] visible, ascending and on the host."""

    @abstractmethod
    def write_back(self, rows: Tensor, positions: Tensor, full_rows: Tensor) -> None:
        """Copy working rows [n] to the full cache, if it exists."""

    def advance(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count tokens, already in the next rows, as visible."""
        sequence = self.of[slot]
        sequence.visible += len(token_ids)
        sequence.length += len(token_ids)


class DraftCache(VisibleCache):
    """Full and working cache of a draft."""

    def __init__(
        self,
        working: KVCache,
        num_full_rows: int,
        inv_freq: Tensor,
        turned: tuple[int, int] | None = None,
    ):
        """Allocate the full cache.

        Args:
            inv_freq: Frequencies, see `rotate`.
            turned: First and end of the elements of a key that RoPE turns; None: all.
        """
        super().__init__(working)
        num_layers, _, num_heads, _, head_dim = working.stored.shape
        dtype = working.stored.dtype
        device = working.stored.device
        shapes = [(num_heads, head_dim)] * num_layers
        self._full = KVCache(shapes, num_full_rows, dtype, device)
        self._inv_freq = inv_freq.float().to(device)
        self._turned = turned

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Turn keys [..., n, K, D] by RoPE to `positions` [..., n], see `rotate`."""
        if self._turned is None:
            return rotate(keys, positions, self._inv_freq)
        before, turned, after = keys.tensor_split(self._turned, -1)
        return torch.cat([before, rotate(turned, positions, self._inv_freq), after], -1)

    def pair(self, slot: int, text: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Pair the tokens of a prompt's chunk with the features of the tokens before them.

        The features of the last token wait for the next chunk.

        Args:
            slot: The prompt's slot.
            text: Earlier tokens, then the chunk's [.. + T].
            features: Features [T, F] at the chunk's tokens.

        Returns:
            Tokens [.. + n], and features [n, F] for the last n.
        """
        held = self.of[slot]
        if held.pending is None:
            text = text[1:]
        else:
            features = torch.cat([held.pending, features])
        held.pending = features[-1:].clone()
        return text, features[:-1]

    def admit(self, slot: int, num_tokens: int, num_working_rows: int) -> bool:
        """Reserve rows of both caches, see `VisibleCache.admit`."""
        if not super().admit(slot, num_tokens, num_working_rows):
            return False
        if (full := self._full.rows.take(num_tokens)) is None:
            super().release(slot)
            return False
        self.of[slot].full = full
        return True

    def release(self, slot: int) -> None:
        """Free the rows of both caches."""
        self._full.rows.give_back(self.of[slot].full)
        super().release(slot)

    def store(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Append keys at position 0 and values, both [L, n, K, D], to the full cache."""
        sequence = self.of[slot]
        first = sequence.full_end
        sequence.length += keys.shape[1]
        assert sequence.length <= sequence.full.size, "the full cache is full"
        rows = slice(first, first + keys.shape[1])
        self._full.keys[:, :, rows] = keys.transpose(1, 2)
        self._full.values[:, :, rows] = values.transpose(1, 2)

    def select(self, slot: int, positions: Tensor) -> None:
        """Copy the tokens at `positions` [S] to the working cache, at positions 0 to S - 1."""
        sequence = self.of[slot]
        positions = positions[positions < sequence.length]
        count = len(positions)
        assert count <= sequence.working.size, "the working cache is full"
        source = upload(positions + sequence.full.start, self._inv_freq.device)
        rows = slice(sequence.working.start, sequence.working.start + count)
        places = torch.arange(count, device=source.device)
        keys = self.turn(self._full.keys[:, :, source].transpose(1, 2), places)
        self.working.keys[:, :, rows] = keys.transpose(1, 2)
        self.working.values[:, :, rows] = self._full.values[:, :, source]
        sequence.visible = count

    def write_back(self, rows: Tensor, positions: Tensor, full_rows: Tensor) -> None:
        """Copy working rows [n] with keys at `positions` [n] to `full_rows` [n] of the full cache.

        All are int64 on the device.
        """
        new = self.working.stored.index_select(3, rows)
        keys = self.turn(new[:, 0].transpose(1, 2), -positions)
        self._full.stored.index_copy_(
            3, full_rows, torch.stack([keys.transpose(1, 2), new[:, 1]], 1)
        )

    def advance(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count tokens, already written back, as visible."""
        super().advance(slot, token_ids)
        sequence = self.of[slot]
        assert sequence.length <= sequence.full.size, "the full cache is full"
