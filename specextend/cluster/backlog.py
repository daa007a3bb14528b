"""The queue of documents waiting for a worker, and their estimated lengths. Pure.

A neighbourhood holds the rows of a row group. A worker empties its neighbourhood before it starts
another, so each row group is read once. Neighbourhoods start in the order of their longest
documents, and are shared only when no new ones are left. Estimates are stored in columns, to hold
ten million documents.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specextend.core import DocumentKey

Ints = NDArray[np.int64]
LENGTH_STEP = 1.1
"""Ratio below which lengths count as similar."""

Rank = tuple[int, DocumentKey]
"""Position in the order of work (smallest first), and the document."""


def rank(num_tokens: int, key: DocumentKey) -> Rank:
    """Rank a document: longest first, similar lengths in input order."""
    return int(ranks(np.array([num_tokens]))[0]), key


def ranks(num_tokens: Ints) -> Ints:
    """Rank lengths [N], longest first. Similar lengths get equal ranks."""
    return -np.round(np.log(np.maximum(1, num_tokens)) / math.log(LENGTH_STEP)).astype(np.int64)


_FILE_STEP = 1 << 40


class TokenEstimate(NamedTuple):
    """Estimated tokens of a document."""

    num_prompt_tokens: int
    max_new_tokens: int

    @property
    def total(self) -> int:
        """Sum prompt and maximum output."""
        return self.num_prompt_tokens + self.max_new_tokens


class RowSet:
    """A set of input rows, stored as one byte per row."""

    def __init__(self, file_rows: Sequence[int], keys: Iterable[DocumentKey]):
        self._masks = [np.zeros(num_rows, np.bool_) for num_rows in file_rows]
        for file, row in keys:
            self._masks[file][row] = True

    def __len__(self) -> int:
        return sum(int(mask.sum()) for mask in self._masks)

    def __contains__(self, key: DocumentKey) -> bool:
        """Return True for a key of the set, which need not be a row."""
        is_row = 0 <= key.file < len(self._masks) and 0 <= key.row < len(self._masks[key.file])
        return is_row and bool(self._masks[key.file][key.row])


class Estimates(Mapping[DocumentKey, TokenEstimate]):
    """Token estimates of documents in input order; [N] int32, over all requests of a document."""

    def __init__(
        self,
        files: NDArray[Any],
        rows: NDArray[Any],
        num_prompt_tokens: NDArray[Any],
        max_new_tokens: NDArray[Any],
    ):
        self._numbers = files.astype(np.int64) * _FILE_STEP + rows
        assert np.all(np.diff(self._numbers) > 0), "not in input order"
        self.num_prompt_tokens = num_prompt_tokens.astype(np.int32, copy=False)
        self.max_new_tokens = max_new_tokens.astype(np.int32, copy=False)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[DocumentKey]:
        return map(self.key, range(len(self)))

    def __getitem__(self, key: DocumentKey) -> TokenEstimate:
        position = self.position(key)
        return TokenEstimate(
            int(self.num_prompt_tokens[position]), int(self.max_new_tokens[position])
        )

    def totals(self, positions: Ints | slice = slice(None)) -> Ints:
        """Sum prompt and output tokens at `positions`, by default all [N]."""
        return self.num_prompt_tokens[positions].astype(np.int64) + self.max_new_tokens[positions]

    def position(self, key: DocumentKey) -> int:
        """Return the position of `key`. Raises KeyError."""
        # numpy's searchsorted copies the array for numbers above 64 bits
        position = bisect_left(self._numbers, key.file * _FILE_STEP + key.row)
        if position == len(self) or self.key(position) != key:
            raise KeyError(key)
        return position

    def key(self, position: int) -> DocumentKey:
        """Return the key at `position`."""
        return DocumentKey(*divmod(int(self._numbers[position]), _FILE_STEP))

    def group_bounds(self, group_rows: Sequence[Sequence[int]]) -> Ints:
        """Return the positions [G + 1] that bound the row groups with documents.

        Args:
            group_rows: Rows of each row group, per file. A file without entries is one group.
        """
        begins = [
            file * _FILE_STEP + row
            for file, sizes in enumerate(group_rows)
            for row in accumulate(sizes, initial=0)
        ]
        return np.unique(np.append(self._numbers.searchsorted(begins), (0, len(self))))


class Backlog:
    """Queue of documents. Neighbourhoods not yet started take no memory per document."""

    def __init__(
        self,
        estimates: Estimates,
        group_rows: Sequence[Sequence[int]] = (),
        without: Iterable[DocumentKey] = (),
    ):
        """Queue every document except `without`; `group_rows` as in `group_bounds`."""
        self._estimates = estimates
        self._bounds = estimates.group_bounds(group_rows)
        self._without = {estimates.position(key) for key in without}
        self._size = len(estimates) - len(self._without)
        self._not_begun = self._in_order()
        self._open: dict[int, list[int]] = {}
        """Waiting positions of each started neighbourhood, the next last."""
        self._used: dict[str, int] = {}
        self._returned: list[Rank] = []
        """Heap of documents that any worker takes first."""

    def __len__(self) -> int:
        return self._size

    def take(self, worker: str) -> DocumentKey | None:
        """Remove and return the next document for `worker`, if any."""
        if not self._size:
            return None
        self._size -= 1
        if self._returned:
            return heapq.heappop(self._returned)[1]
        if self._used.get(worker) not in self._open:
            self._used[worker] = self._choose()
        number = self._used[worker]
        position = self._open[number].pop()
        if not self._open[number]:
            del self._open[number]
        return self._estimates.key(position)

    def put(self, key: DocumentKey) -> None:
        """Add a document, or return it to the queue."""
        heapq.heappush(self._returned, rank(self._estimates[key].total, key))
        self._size += 1

    def leave(self, worker: str) -> None:
        """Release the neighbourhood of `worker`."""
        self._used.pop(worker, None)

    def first(self, limit: int) -> list[DocumentKey]:
        """List up to `limit` documents, roughly in the order of work."""
        return list(islice(self._keys(), limit))

    def _keys(self) -> Iterator[DocumentKey]:
        yield from (key for _, key in sorted(self._returned))
        for positions in self._open.values():
            yield from map(self._estimates.key, reversed(positions))
        for number in reversed(self._not_begun):
            yield from map(self._estimates.key, reversed(self._positions(number)))

    def _in_order(self) -> array[int]:
        longest = np.maximum.reduceat(self._estimates.totals(), self._bounds[:-1])
        return array("i", np.argsort(ranks(longest), kind="stable")[::-1].tolist())

    def _positions(self, number: int) -> list[int]:
        begin, end = self._bounds[number : number + 2]
        positions = np.arange(begin, end)
        order = np.argsort(ranks(self._estimates.totals(positions)), kind="stable")
        found: list[int] = positions[order][::-1].tolist()
        return [each for each in found if each not in self._without]

    def _choose(self) -> int:
        """Choose a released neighbourhood, else a new one, else the fullest per user."""
        num_users = Counter(self._used.values())
        left = next((number for number in self._open if not num_users[number]), None)
        if left is not None:
            return left
        while self._not_begun:
            number = self._not_begun.pop()
            if positions := self._positions(number):
                self._open[number] = positions
                return number
        return max(self._open, key=lambda number: len(self._open[number]) / (num_users[number] + 1))
