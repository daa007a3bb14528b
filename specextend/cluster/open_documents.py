"""The documents of a start that are not done: what waits for a worker, what was charged, and what is given up. Pure.

An object is held only of documents that are leased, or of which there is something to remember.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Mapping, Sequence

from specextend.cluster.backlog import Backlog
from specextend.cluster.estimates import Estimates
from specextend.cluster.leases import (
    MAX_UNCHARGED_EXPOSURES,
    PAUSE_S,
    GivenUp,
    Item,
    Limits,
    Rank,
    Tried,
    rank,
)
from specextend.cluster.places import Place
from specextend.core import DocumentKey


class OpenDocuments:
    """Documents that are neither done nor given up."""

    def __init__(
        self,
        estimates: Estimates,
        limits: Limits,
        tried: Mapping[DocumentKey, Tried],
        group_rows: Sequence[Sequence[int]],
    ) -> None:
        """Take all documents. tried, group_rows: as `Scheduler` takes them."""
        self._estimates, self._limits = estimates, limits
        self.num_open = len(estimates)
        """Number of open documents."""
        self.num_tokens = int(estimates.totals.sum())
        """Estimated tokens of all of them."""
        self.alone: list[Rank] = []
        """Those that wait to run alone, in the order of work."""
        self._later: list[tuple[float, DocumentKey]] = []
        self._items = {
            key: Item(
                key,
                estimates[key].total,
                before.attempts,
                before.forgiven,
                strikes=before.attempts - before.forgiven,
                struck=set(before.struck),
            )
            for key, before in tried.items()
            if key in estimates
        }
        self._has_charged = False
        apart = [item for item in self._items.values() if item.runs_alone]
        self._backlog = Backlog(estimates, group_rows, [item.key for item in apart])
        for item in apart:
            self.put_back(item)

    @property
    def num_waiting(self) -> int:
        """Count the documents that no worker holds."""
        return self.num_fresh + len(self.alone) + len(self._later)

    @property
    def num_fresh(self) -> int:
        """Count those of them that any worker may get now, beside others."""
        return len(self._backlog)

    def first_waiting(self, limit: int) -> list[DocumentKey]:
        """List documents that no worker holds, up to a number, those that run alone first."""
        later = [key for _, key in sorted(self._later)]
        return [*(key for _, key in self.alone), *self._backlog.first(limit), *later][:limit]

    def item(self, key: DocumentKey) -> Item:
        """Return what is known of a document that is taken or waits to run alone."""
        if (item := self._items.get(key)) is None:
            item = self._items[key] = Item(key, self._estimates[key].total)
        return item

    def take(self, worker: str, but_of: Collection[int | None], longest: float) -> DocumentKey | None:
        """Take the next document for a worker, not of the files `but_of`, unless it has more tokens than `longest`."""
        key = self._backlog.take(worker, but_of)
        if key is None or self._estimates[key].total <= longest:
            return key
        self._backlog.put(key)
        return None

    def left_by(self, worker: str) -> None:
        """Note that a worker takes no more documents, so that others go on where it was."""
        self._backlog.leave(worker)

    def put_back(self, item: Item) -> None:
        """Let a document wait."""
        if item.runs_alone:
            bisect.insort(self.alone, rank(item.num_tokens, item.key))
        else:
            if not item.is_memorable:
                del self._items[item.key]
            self._backlog.put(item.key)

    def put_back_later(self, now: float) -> None:
        """Let the documents wait whose pause is over."""
        while self._later and self._later[0][0] <= now:
            self.put_back(self._items[heapq.heappop(self._later)[1]])

    def close(self, item: Item) -> None:
        """Note that a document is done."""
        del self._items[item.key]
        self.num_open -= 1
        self.num_tokens -= item.num_tokens

    def charges(self) -> dict[DocumentKey, Tried] | None:
        """List documents that may have ended workers; None if none was charged since the last call."""
        if not self._has_charged:
            return None
        self._has_charged = False
        charged = (item for item in self._items.values() if item.strikes)
        return {item.key: Tried(item.attempts, frozenset(item.struck)) for item in charged}

    def charge(self, item: Item, place: Place, error_class: str, message: str, *, is_certain: bool) -> list[GivenUp]:
        """Charge a document. If it is not certain to be at fault, its last attempt is kept for a run alone."""
        if not is_certain and item.num_counted + 1 == self._limits.max_attempts:
            self.set_apart(item, place)
            return []
        item.attempts += 1
        item.strikes += 1
        item.struck.add(place.spot)
        if item.num_counted >= self._limits.max_attempts:
            return [self._give_up(item, error_class, message)]
        self._has_charged = True
        self.put_back(item)
        return []

    def charge_damaged(self, item: Item, error_class: str, message: str, now: float) -> list[GivenUp]:
        """Charge a document that nobody can read, and let it wait for `PAUSE_S`."""
        item.attempts += 1
        if item.num_counted >= self._limits.max_attempts:
            return [self._give_up(item, error_class, message)]
        heapq.heappush(self._later, (now + PAUSE_S, item.key))
        return []

    def set_apart(self, item: Item, place: Place) -> None:
        """Let a document run alone from now on, and elsewhere if it can, without charging it."""
        item.exposures = MAX_UNCHARGED_EXPOSURES
        item.struck.add(place.spot)
        self.put_back(item)

    def count_loss(self, item: Item, message: str) -> list[GivenUp]:
        """Count a lease that was lost with its node."""
        item.losses += 1
        if item.losses >= self._limits.max_losses:
            return [self._give_up(item, "NodeLost", message)]
        self.put_back(item)
        return []

    def expose(self, item: Item) -> None:
        """Count the death of a worker at which a document waited."""
        item.exposures += 1
        self.put_back(item)

    def _give_up(self, item: Item, error_class: str, message: str) -> GivenUp:
        self.close(item)
        return GivenUp(item.key, max(item.attempts, 1), error_class, message)
