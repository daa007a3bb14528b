"""A function called on many items at once in a bounded pool of threads, with its results in the order of the items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 32
"""Requests to a store that are under way at once: each waits for milliseconds and needs no processor meanwhile."""

Item = TypeVar("Item")
Value = TypeVar("Value")


def in_order(
    function: Callable[[Item], Value],
    items: Iterable[Item],
    *,
    cost: Callable[[Item], int] = lambda item: 0,
    most: int = 0,
    num_threads: int = NUM_THREADS,
) -> Iterator[Value]:
    """Yield what `function` returns for each item, in the order of the items.

    cost: of an item; those that are under way, or whose results were not taken yet, cost at most `most` together, or
    are a single one. An exception is raised where the result would be; what has not begun by then never does.
    """
    started: deque[tuple[Future[Value], int]] = deque()
    total = 0
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for item in items:
                price = cost(item)
                while started and (len(started) >= num_threads or total + price > most > 0):
                    yield started[0][0].result()
                    total -= started.popleft()[1]
                started.append((pool.submit(function, item), price))
                total += price
            while started:
                yield started[0][0].result()
                started.popleft()
        finally:
            for future, _ in started:
                future.cancel()
