"""Many requests at once, in bounded memory, as if they came one after the other."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.data.in_order import in_order


@settings(max_examples=30)
@given(st.lists(st.integers(0, 10), max_size=40), st.integers(1, 20), st.integers(1, 6))
def test_results_come_in_order_and_no_more_is_held_than_allowed(costs: list[int], most: int, num_threads: int) -> None:
    """What is under way, what waits and what the caller looks at: all of it is memory."""
    lock, held, highest = threading.Lock(), list[int](), 0

    def work(number: int) -> int:
        nonlocal highest
        with lock:
            held.append(number)
            total = sum(costs[each] for each in held)
            highest = max(highest, total if len(held) > 1 else 0)
            assert len(held) <= num_threads
        return number

    seen = []
    for number in in_order(work, range(len(costs)), cost=costs.__getitem__, most=most, num_threads=num_threads):
        seen.append(number)
        with lock:
            held.remove(number)
    assert seen == list(range(len(costs)))
    assert highest <= most


def test_an_error_comes_in_its_place_and_what_has_not_begun_never_does() -> None:
    """A thousand files are not written after the first could not be."""
    begun = []

    def fails(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError(number)
        return number

    results = in_order(fails, iter(range(1000)), num_threads=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)
    assert max(begun) <= 3 + 2
