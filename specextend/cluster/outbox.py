"""What a worker has for the driver until the driver says that it has arrived. Pure; whoever uses it holds a lock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Items in the order in which they were added: a poll may be lost, so each is shown until it was seen."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._num_forgotten = 0

    def add(self, items: Iterable[Item]) -> None:
        """Add items."""
        self._items += items

    def after(self, num_seen: int) -> tuple[Item, ...]:
        """Return the items that follow the first `num_seen` of all, and forget those."""
        del self._items[: max(0, num_seen - self._num_forgotten)]
        self._num_forgotten = max(num_seen, self._num_forgotten)
        return tuple(self._items)
