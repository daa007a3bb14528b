"""The order in which documents that wait are handed out."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from specextend.cluster.backlog import LENGTH_STEP, Backlog
from specextend.core import DocumentKey
from tests.cluster.lengths import of_length, rows_of_length


def reads(num_workers, num_groups, size):
    """Row groups that workers begin, each taking a document in turn."""
    lengths = {DocumentKey(0, row): 1 + row * 7919 % 1000 for row in range(num_groups * size)}
    backlog = Backlog(of_length(lengths), [[size] * num_groups])
    begun = set()
    while len(backlog):
        for worker in map(str, range(num_workers)):
            if (key := backlog.take(worker)) is not None:
                begun.add((worker, key.row // size))
    return len(begun)


def test_a_row_group_is_read_by_one_worker_until_none_is_left_to_begin():
    """With longest first over the whole corpus, 64 workers read each of 665 times."""
    assert reads(8, 40, 16) == 40
    assert reads(8, 41, 16) <= 41 + 8
    assert reads(8, 1, 100) == 8, "one group is shared by all"


@given(st.lists(st.integers(0, 100_000), max_size=40))
def test_no_document_goes_before_one_that_is_much_longer(lengths):
    """A long one begun last would run on while every other worker idles; a tenth more makes no such tail."""
    backlog = Backlog(rows_of_length(lengths))
    order = [lengths[key.row] for key in iter(lambda: backlog.take("a"), None)]
    for earlier, later in pairwise(order):
        assert max(1, later) <= max(1, earlier) * LENGTH_STEP * 1.0001
