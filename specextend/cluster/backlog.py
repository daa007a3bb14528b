"""The documents of a start: their estimated tokens, and those that wait for a worker, by
neighbourhood. Pure.

Estimates are columns: a few bytes for each of ten million documents. A neighbourhood is the rows of
one row group, which a worker reads whole.

A worker takes its documents from one neighbourhood until that is empty, so that each row group is
read once, not once for every row. Neighbourhoods are begun in the order of their longest documents,
and each gives its longest first. Only where none is left to begin do workers share one, and each of
them reads it.
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
"""Factor between two lengths that count as different; documents of about one length go in input
order.
"""

Rank = tuple[int, DocumentKey]
"""A document with its place in the order of work; the smallest comes first."""


def rank(num_tokens: int, key: DocumentKey) -> Rank:
    """Order a document: longest first, and those of about one length in input order."""
    return int(ranks(np.array([num_tokens]))[0]), key


def ranks(num_tokens: Ints) -> Ints:
    """Return the places [N] of lengths [N] in the order of work, equal for those of about one
    length.
    """
    return -np.round(np.log(np.maximum(1, num_tokens)) / math.log(LENGTH_STEP)).astype(np.int64)


_FILE_STEP = 1 << 40
"""The number of a row in the input is its file's times this, and its own in the file."""


class TokenEstimate(NamedTuple):
    """Estimated tokens of a document that has not run yet."""

    num_prompt_tokens: int
    max_new_tokens: int

    @property
    def total(self) -> int:
        """Return the most tokens that the document may take, prompt and output."""
        return self.num_prompt_tokens + self.max_new_tokens


class RowSet:
    """A set of input rows: one byte for each row of the input."""

    def __init__(self, file_rows: Sequence[int], keys: Iterable[DocumentKey]):
        """Take the keys. file_rows: rows of each input file."""
        self._masks = [np.zeros(num_rows, np.bool_) for num_rows in file_rows]
        for file, row in keys:
            self._masks[file][row] = True

    def __len__(self) -> int:
        return sum(int(mask.sum()) for mask in self._masks)

    def __contains__(self, key: DocumentKey) -> bool:
        """Return True for a key of the set; a part of another input may have keys of rows that no
        file has.
        """
        is_row = 0 <= key.file < len(self._masks) and 0 <= key.row < len(self._masks[key.file])
        return is_row and bool(self._masks[key.file][key.row])


class Estimates(Mapping[DocumentKey, TokenEstimate]):
    """The documents of a start in input order, each at its position.

    num_prompt_tokens, max_new_tokens [N] int32, of all requests for a document.
    """

    def __init__(
        self,
        files: NDArray[Any],
        rows: NDArray[Any],
        num_prompt_tokens: NDArray[Any],
        max_new_tokens: NDArray[Any],
    ):
        """Take columns [N] in input order."""
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
        """Return the tokens of the documents at some positions, or of all [N], prompt and
        output.
        """
        return self.num_prompt_tokens[positions].astype(np.int64) + self.max_new_tokens[positions]

    def position(self, key: DocumentKey) -> int:
        """Return the position of a document. Raises KeyError for a row that is not among them."""
        # not numpy's own search, which copies all of them for a number that has more than 64 bits
        position = bisect_left(self._numbers, key.file * _FILE_STEP + key.row)
        if position == len(self) or self.key(position) != key:
            raise KeyError(key)
        return position

    def key(self, position: int) -> DocumentKey:
        """Return the key of the document at a position."""
        return DocumentKey(*divmod(int(self._numbers[position]), _FILE_STEP))

    def group_bounds(self, group_rows: Sequence[Sequence[int]]) -> Ints:
        """Return the positions [G + 1] that bound the row groups which hold documents.

        group_rows: the rows of each group of each file; the files that have none here are one
        group.
        """
        begins = [
            file * _FILE_STEP + row
            for file, sizes in enumerate(group_rows)
            for row in accumulate(sizes, initial=0)
        ]
        return np.unique(np.append(self._numbers.searchsorted(begins), (0, len(self))))


class Backlog:
    """Documents that wait. Of those in neighbourhoods that are not begun, no object is held."""

    def __init__(
        self,
        estimates: Estimates,
        group_rows: Sequence[Sequence[int]] = (),
        without: Iterable[DocumentKey] = (),
    ):
        """Take all documents but those of `without`.

        group_rows: the rows of each row group of each file, as workers read it.
        """
        self._estimates = estimates
        self._bounds = estimates.group_bounds(group_rows)
        self._without = {estimates.position(key) for key in without}
        self._size = len(estimates) - len(self._without)
        self._not_begun = self._in_order()
        self._open: dict[int, list[int]] = {}
        """The positions of the documents that wait in each neighbourhood that has been begun, the
        next one last.
        """
        self._used: dict[str, int] = {}
        """The neighbourhood from which each worker takes."""
        self._returned: list[Rank] = []
        """Heap of documents that came back: they go first, to whichever worker asks."""

    def __len__(self) -> int:
        return self._size

    def take(self, worker: str) -> DocumentKey | None:
        """Remove and return the next document for a worker; None if there is none."""
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
        """Put back a document that was taken, or one of `without`."""
        heapq.heappush(self._returned, rank(self._estimates[key].total, key))
        self._size += 1

    def leave(self, worker: str) -> None:
        """Note that a worker takes nothing more from the neighbourhood that it used."""
        self._used.pop(worker, None)

    def first(self, limit: int) -> list[DocumentKey]:
        """List documents that wait, up to a number, in about the order in which they will be
        taken.
        """
        return list(islice(self._keys(), limit))

    def _keys(self) -> Iterator[DocumentKey]:
        yield from (key for _, key in sorted(self._returned))
        for positions in self._open.values():
            yield from map(self._estimates.key, reversed(positions))
        for number in reversed(self._not_begun):
            yield from map(self._estimates.key, reversed(self._positions(number)))

    def _in_order(self) -> array[int]:
        """Number the neighbourhoods, those with the longest documents last, others in input
        order.
        """
        longest = np.maximum.reduceat(self._estimates.totals(), self._bounds[:-1])
        return array("i", np.argsort(ranks(longest), kind="stable")[::-1].tolist())

    def _positions(self, number: int) -> list[int]:
        """List the documents of a neighbourhood that has not been begun, the next one last."""
        begin, end = self._bounds[number : number + 2]
        positions = np.arange(begin, end)
        order = np.argsort(ranks(self._estimates.totals(positions)), kind="stable")
        found: list[int] = positions[order][::-1].tolist()
        return [each for each in found if each not in self._without]

    def _choose(self) -> int:
        """Choose a neighbourhood: one that others have left, else a new one, else that with most
        for each worker.
        """
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
