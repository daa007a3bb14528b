"""The documents that wait for a worker, by neighbourhood: the rows of one row group, which a worker reads whole. Pure.

A worker takes its documents from one neighbourhood until that is empty, so that each row group is read once, not once
for every row. Neighbourhoods are begun in the order of their longest documents, and each gives its longest first. Only
where none is left to begin do workers share one, and each of them reads it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from specextend.cluster.estimates import Estimates
from specextend.core import DocumentKey

LENGTH_STEP = 1.1
"""Factor between two lengths that count as different; documents of about one length go in input order."""

Rank = tuple[int, DocumentKey]
"""A document with its place in the order of work; the smallest comes first."""


def rank(num_tokens: int, key: DocumentKey) -> Rank:
    """Order a document: longest first, and those of about one length in input order."""
    return int(ranks(np.array([num_tokens]))[0]), key


def ranks(num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places [N] of lengths [N] in the order of work, equal for those of about one length."""
    return -np.round(np.log(np.maximum(1, num_tokens)) / math.log(LENGTH_STEP)).astype(np.int64)


@dataclass(slots=True)
class _Neighbourhood:
    """A neighbourhood that has been begun."""

    positions: NDArray[np.int64]
    """Its documents that nobody has had yet, the next one first; those before `taken` are gone."""
    ranks: NDArray[np.int64]
    """Of these documents, as numbers: `rank` without the key."""
    tokens: int
    """Of all documents that wait in it."""
    taken: int = 0
    returned: list[Rank] = field(default_factory=list)
    """Documents that came back. A heap."""
    num_users: int = 0

    @property
    def is_empty(self) -> bool:
        """Return True if no document waits in it."""
        return not self.returned and self.taken == len(self.positions)

    @property
    def next_rank(self) -> int:
        """Return the rank of its next document, without the key."""
        fresh = [int(self.ranks[self.taken])] if self.taken < len(self.positions) else []
        return min([*fresh, self.returned[0][0]] if self.returned else fresh)


class Backlog:
    """Documents that wait. Of those that nobody has had yet, no object is held."""

    def __init__(
        self, estimates: Estimates, group_rows: Sequence[Sequence[int]] = (), without: Iterable[DocumentKey] = ()
    ) -> None:
        """Take all documents but those of `without`.

        group_rows: the rows of each row group of each file, as workers read it.
        """
        self._estimates = estimates
        self._starts = estimates.group_starts(group_rows)
        self._without = {estimates.position(key) for key in without}
        self._size = len(estimates) - len(self._without)
        self._order = self._in_order()
        self._next = 0
        self._is_begun = np.zeros(len(self._starts), np.bool_)
        self._open: dict[int, _Neighbourhood] = {}
        self._used: dict[str, int] = {}

    def __len__(self) -> int:
        return self._size

    def take(self, worker: str) -> DocumentKey | None:
        """Remove and return the next document for a worker; None if there is none."""
        if not self._size:
            return None
        number = self._used.get(worker)
        if number is None or self._open[number].is_empty:
            self.leave(worker)
            self._used[worker] = number = self._choose()
            self._open[number].num_users += 1
        self._size -= 1
        return self._pop(self._open[number])

    def put(self, key: DocumentKey) -> None:
        """Put back a document that was taken, or one of `without`."""
        position = self._estimates.position(key)
        total = self._estimates.at(position).total
        number = int(self._starts.searchsorted(position, side="right")) - 1
        if not self._is_begun[number]:
            self._begin(number)
        elif number not in self._open:
            empty = np.empty(0, np.int64)
            self._open[number] = _Neighbourhood(empty, empty, 0)
        found = self._open[number]
        heapq.heappush(found.returned, rank(total, key))
        found.tokens += total
        self._size += 1

    def leave(self, worker: str) -> None:
        """Note that a worker takes nothing more from the neighbourhood that it used."""
        if (number := self._used.pop(worker, None)) is None:
            return
        found = self._open[number]
        found.num_users -= 1
        if not found.num_users and found.is_empty:
            del self._open[number]

    def first(self, limit: int) -> list[DocumentKey]:
        """List documents that wait, up to a number, those of neighbourhoods that have been begun first."""
        return list(islice(self._keys(), limit))

    def _keys(self) -> Iterator[DocumentKey]:
        for found in self._open.values():
            yield from (key for _, key in sorted(found.returned))
            yield from map(self._estimates.key, found.positions[found.taken :].tolist())
        for number in self._order[self._next :].tolist():
            if not self._is_begun[number]:
                yield from map(self._estimates.key, self._positions(number).tolist())

    def _in_order(self) -> NDArray[np.int32]:
        """Number the neighbourhoods [G], those with the longest documents first, others in input order."""
        if not len(self._starts):
            return np.empty(0, np.int32)
        longest = np.maximum.reduceat(self._estimates.totals, self._starts)
        return np.argsort(ranks(longest), kind="stable").astype(np.int32)

    def _positions(self, number: int) -> NDArray[np.int64]:
        """List the documents of a neighbourhood that has not been begun, in their order."""
        begin = int(self._starts[number])
        end = int(self._starts[number + 1]) if number + 1 < len(self._starts) else len(self._estimates)
        positions = np.arange(begin, end)
        if self._without:
            positions = positions[[position not in self._without for position in positions.tolist()]]
        return positions[np.argsort(ranks(self._estimates.totals_at(positions)), kind="stable")]

    def _begin(self, number: int) -> int:
        positions = self._positions(number)
        totals = self._estimates.totals_at(positions)
        self._open[number] = _Neighbourhood(positions, ranks(totals), int(totals.sum()))
        self._is_begun[number] = True
        return number

    def _choose(self) -> int:
        """Choose a neighbourhood: one that others have left, else a new one, else that with most for each worker."""
        waiting = {number: found for number, found in self._open.items() if not found.is_empty}
        left = [number for number, found in waiting.items() if not found.num_users]
        if left:
            return min(left, key=lambda number: (waiting[number].next_rank, number))
        while self._next < len(self._order):
            number = int(self._order[self._next])
            self._next += 1
            if not self._is_begun[number] and not self._open[self._begin(number)].is_empty:
                return number
        return max(waiting, key=lambda number: waiting[number].tokens / (waiting[number].num_users + 1))

    def _pop(self, found: _Neighbourhood) -> DocumentKey:
        fresh = None
        if found.taken < len(found.positions):
            fresh = int(found.ranks[found.taken]), self._estimates.key(int(found.positions[found.taken]))
        if found.returned and (fresh is None or found.returned[0] < fresh):
            _, key = heapq.heappop(found.returned)
        else:
            assert fresh is not None
            found.taken += 1
            key = fresh[1]
        found.tokens -= self._estimates[key].total
        return key
