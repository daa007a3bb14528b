"""In which order documents are leased."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from specextend.cluster.backlog import LENGTH_STEP
from specextend.cluster.messages import Place
from specextend.cluster.scheduler import Scheduler
from specextend.config import JobOptions
from specextend.core import DocumentKey
from tests.cluster.lengths import rows_of_length


def order(lengths: list[int]) -> list[DocumentKey]:
    """Keys as one worker would get them, one at a time."""
    plan = Scheduler(rows_of_length(lengths), JobOptions(), 1)
    plan.join("a", Place("host", "seat 1"), 0)
    keys = []
    while not plan.is_done:
        [(_, lease)] = plan.assign(0)
        keys.append(lease.key)
        plan.finish(lease.lease_id)
    return keys


@given(st.lists(st.integers(0, 100_000), max_size=40))
def test_no_document_goes_before_one_that_is_much_longer(lengths: list[int]) -> None:
    """A long one begun last would run on while every other worker idles; a tenth more makes no such tail."""
    for earlier, later in pairwise(order(lengths)):
        assert max(1, lengths[later.row]) <= max(1, lengths[earlier.row]) * LENGTH_STEP * 1.0001
