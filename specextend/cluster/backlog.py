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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
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
        self._size = sum(int(mask.sum()) for mask in self._masks)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: DocumentKey) -> bool:
        """Return True for a key of the set; a part of another input may have keys of rows that no
        file has.
        """
        is_row = 0 <= key.file < len(self._masks) and 0 <= key.row < len(self._masks[key.file])
        return is_row and bool(self._masks[key.file][key.row])


class Estimates(Mapping[DocumentKey, TokenEstimate]):
    """The documents of a start in input order, each at its position.

    rows [N] int64; num_prompt_tokens, max_new_tokens [N] int32, of all requests for a document;
    `span` gives the positions of a file.
    """

    def __init__(
        self,
        files: NDArray[Any],
        rows: NDArray[Any],
        num_prompt_tokens: NDArray[Any],
        max_new_tokens: NDArray[Any],
    ):
        """Take columns [N] in input order."""
        assert np.all((np.diff(files) > 0) | ((np.diff(files) == 0) & (np.diff(rows) > 0))), (
            "not in input order"
        )
        self.rows = rows.astype(np.int64, copy=False)
        self.num_prompt_tokens = num_prompt_tokens.astype(np.int32, copy=False)
        self.max_new_tokens = max_new_tokens.astype(np.int32, copy=False)
        self.num_files = int(files[-1]) + 1 if len(files) else 0
        """A number that is above those of all files with documents."""
        self._starts = np.searchsorted(files, np.arange(self.num_files + 1))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DocumentKey]:
        for file in range(self.num_files):
            for row in self.rows[self.span(file)].tolist():
                yield DocumentKey(file, row)

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

    def span(self, file: int) -> slice:
        """Return the positions of a file's documents."""
        return slice(int(self._starts[file]), int(self._starts[file + 1]))

    def position(self, key: DocumentKey) -> int:
        """Return the position of a document. Raises KeyError for a row that is not among them."""
        if not 0 <= key.file < self.num_files:
            raise KeyError(key)
        span = self.span(key.file)
        position = span.start + int(self.rows[span].searchsorted(key.row))
        if position == span.stop or self.rows[position] != key.row:
            raise KeyError(key)
        return position

    def key(self, position: int) -> DocumentKey:
        """Return the key of the document at a position."""
        file = int(self._starts.searchsorted(position, side="right")) - 1
        return DocumentKey(file, int(self.rows[position]))

    def group_starts(self, group_rows: Sequence[Sequence[int]]) -> Ints:
        """Return the position [G] at which each row group begins that holds documents.

        group_rows: the rows of each group of each file; a file that has none here is one group.
        """
        starts = [np.empty(0, np.int64)]
        for file in range(self.num_files):
            span = self.span(file)
            sizes = group_rows[file] if file < len(group_rows) else ()
            ends = np.cumsum(np.array([0, *sizes][:-1] if sizes else [0], np.int64))
            begins = np.unique(self.rows[span].searchsorted(ends))
            starts.append(span.start + begins[begins < span.stop - span.start])
        return np.concatenate(starts)


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
        self._starts = estimates.group_starts(group_rows)
        self._without = {estimates.position(key) for key in without}
        self._size = len(estimates) - len(self._without)
        self._not_begun = self._in_order()
        self._open: dict[int, list[int]] = {}
        """The positions of the documents that wait in each neighbourhood that has been begun, the
        next one last.
        """
        self._used: dict[str, int] = {}
        """The neighbourhood from which each worker takes."""
        self._users: Counter[int] = Counter()
        """The number of workers that take from each neighbourhood."""
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
            self.leave(worker)
            self._used[worker] = chosen = self._choose()
            self._users[chosen] += 1
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
        if (number := self._used.pop(worker, None)) is not None:
            self._users[number] -= 1

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
        if not len(self._starts):
            return array("i")
        longest = np.maximum.reduceat(self._estimates.totals(), self._starts)
        return array("i", np.argsort(ranks(longest), kind="stable")[::-1].tolist())

    def _positions(self, number: int) -> list[int]:
        """List the documents of a neighbourhood that has not been begun, the next one last."""
        begin = int(self._starts[number])
        end = (
            int(self._starts[number + 1])
            if number + 1 < len(self._starts)
            else len(self._estimates)
        )
        positions = np.arange(begin, end)
        order = np.argsort(ranks(self._estimates.totals(positions)), kind="stable")
        found: list[int] = positions[order][::-1].tolist()
        return [each for each in found if each not in self._without] if self._without else found

    def _choose(self) -> int:
        """Choose a neighbourhood: one that others have left, else a new one, else that with most
        for each worker.
        """
        if (
            left := next((number for number in self._open if not self._users[number]), None)
        ) is not None:
            return left
        while self._not_begun:
            number = self._not_begun.pop()
            if positions := self._positions(number):
                self._open[number] = positions
                return number
        return max(
            self._open, key=lambda number: len(self._open[number]) / (self._users[number] + 1)
        )
