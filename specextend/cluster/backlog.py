"""The documents that wait for a worker, by neighbourhood: the rows of one row group, which a worker reads whole. Pure.

A worker takes its documents from one neighbourhood until that is empty, so that each row group is read once, not once
for every row. Neighbourhoods are begun in the order of their longest documents, and each gives its longest first. Only
where none is left to begin do workers share one, and each of them reads it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from specextend.cluster.estimates import Estimates
from specextend.cluster.leases import Rank, rank, ranks
from specextend.core import DocumentKey


@dataclass(slots=True)
class _Neighbourhood:
    """A neighbourhood that has been begun."""

    file: int
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

    @property
    def share(self) -> float:
        """Return the tokens for each worker if one more takes from it."""
        return self.tokens / (self.num_users + 1)


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
        self._left: set[int] = set()
        """Those of the open ones that no worker uses."""
        self._used: dict[str, int] = {}
        self._shares: list[tuple[float, int]] | None = None
        """Heap of the open ones by what they leave to one more worker, as it was at some time; None before it matters.
        """

    def __len__(self) -> int:
        return self._size

    def take(self, worker: str, but_of: Collection[int | None] = ()) -> DocumentKey | None:
        """Remove and return the next document for a worker, not of the files `but_of`; None if there is none."""
        while (number := self._used.get(worker)) is None or not self._has_for(number, but_of):
            self.leave(worker)
            if (number := self._choose(but_of)) is None:
                return None
            self._used[worker] = number
            self._open[number].num_users += 1
            self._left.discard(number)
        self._size -= 1
        return self._pop(self._open[number])

    def put(self, key: DocumentKey) -> None:
        """Put back a document that was taken, or one of `without`."""
        position = self._estimates.position(key)
        total = self._estimates.at(position).total
        number = int(self._starts.searchsorted(position, side="right")) - 1
        found = self._open.get(number)
        if found is None and not self._is_begun[number]:
            found = self._begin(number)
        elif found is None:
            empty = np.empty(0, np.int64)
            found = self._open[number] = _Neighbourhood(key.file, empty, empty, 0)
            self._left.add(number)
        heapq.heappush(found.returned, rank(total, key))
        found.tokens += total
        self._offer(number)
        self._size += 1

    def leave(self, worker: str) -> None:
        """Note that a worker takes nothing more from the neighbourhood that it used."""
        if (number := self._used.pop(worker, None)) is None:
            return
        found = self._open[number]
        found.num_users -= 1
        if not found.num_users and found.is_empty:
            del self._open[number]
        elif not found.num_users:
            self._left.add(number)

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

    def _begin(self, number: int) -> _Neighbourhood:
        positions = self._positions(number)
        totals = self._estimates.totals_at(positions)
        found = self._open[number] = _Neighbourhood(self._file(number), positions, ranks(totals), int(totals.sum()))
        self._is_begun[number] = True
        self._left.add(number)
        self._offer(number)
        return found

    def _offer(self, number: int) -> None:
        if self._shares is not None:
            heapq.heappush(self._shares, (-self._open[number].share, number))

    def _choose(self, but_of: Collection[int | None]) -> int | None:
        """Choose a neighbourhood for a worker: one that others have left, else a new one, else the one to share."""
        allowed = [number for number in self._left if self._open[number].file not in but_of]
        if allowed:
            return min(allowed, key=lambda number: (self._open[number].next_rank, number))
        if (number := self._next_new(but_of)) is not None:
            self._begin(number)
            return number
        return self._to_share(but_of)

    def _next_new(self, but_of: Collection[int | None]) -> int | None:
        """Find the next neighbourhood that nobody has begun."""
        while self._next < len(self._order) and self._is_begun[self._order[self._next]]:
            self._next += 1
        for place in range(self._next, len(self._order)):
            number = int(self._order[place])
            if not self._is_begun[number] and self._file(number) not in but_of:
                return number
        return None

    def _to_share(self, but_of: Collection[int | None]) -> int | None:
        """Find the neighbourhood that leaves most to one more worker.

        What is left shrinks, so the heap's old figures are upper bounds: the first one that is up to date is the most.
        """
        if self._shares is None:
            self._shares = [(-found.share, number) for number, found in self._open.items() if not found.is_empty]
            heapq.heapify(self._shares)
        passed, chosen = [], None
        while self._shares and chosen is None:
            old, number = heapq.heappop(self._shares)
            found = self._open.get(number)
            if found is None or found.is_empty:
                continue
            if -found.share > old:
                heapq.heappush(self._shares, (-found.share, number))
            elif found.file in but_of:
                passed.append((old, number))
            else:
                chosen = number
                passed.append((old, number))
        for entry in passed:
            heapq.heappush(self._shares, entry)
        return chosen

    def _file(self, number: int) -> int:
        return self._estimates.key(int(self._starts[number])).file

    def _has_for(self, number: int, but_of: Collection[int | None]) -> bool:
        found = self._open[number]
        return not found.is_empty and found.file not in but_of

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
