import pytest
from hypothesis import given
from hypothesis import strategies as st

from specextend.cluster.backlog import TokenEstimate
from specextend.cluster.progress import Ledger
from specextend.core import DocumentKey
from specextend.stats import DecodingStats
from tests.cluster.lengths import estimates_of

PREFILL_S, DECODE_S = 0.001, 0.02
"""Seconds of a token."""
MOST = 100
"""Output tokens that a document may have."""


@given(
    lengths=st.lists(st.integers(1, 9000), min_size=4, max_size=8),
    num_before=st.integers(0, 3),
    num_output=st.integers(1, MOST),
    num_tasks=st.integers(1, 3),
)
def test_the_time_left_is_what_the_rest_takes(lengths, num_before, num_output, num_tasks):
    """By work, not by rows: after the long half of the rows, far less than half of the time is left. Loading is no
    pace, a resume goes on where the run was, outputs end as early as before, and what tasks read once is one reading.
    """

    def seconds(rows, written=num_output):
        return sum(length * PREFILL_S + written * DECODE_S for length in rows)

    def stats(rows):
        return DecodingStats(
            num_prompt_tokens=num_tasks * sum(rows),
            num_cached_tokens=(num_tasks - 1) * sum(rows),
            num_output_tokens=len(rows) * num_output,
            prefill_s=sum(rows) * PREFILL_S,
            verify_s=len(rows) * num_output * DECODE_S,
        )

    rest = lengths[num_before:]
    planned = {DocumentKey(0, row): TokenEstimate(length, MOST) for row, length in enumerate(rest)}
    book = Ledger(estimates_of(planned), num_before, 0, stats(lengths[:num_before]))
    begin = 100
    for second in range(begin + 1):
        assert book.snapshot(second, 0).eta_s is None
    book.snapshot(begin, 1)
    for row, length in enumerate(rest):
        before, half = rest[:row], num_output // 2
        now = begin + seconds(before) + seconds([length], half)
        found = book.snapshot(now, 1, running=[(length, MOST, half)])
        if row:
            assert found.eta_s == pytest.approx(seconds(rest) - (now - begin))
        book.finish(DocumentKey(0, row), stats([length]))
        found = book.snapshot(begin + seconds(rest[: row + 1]), 1)
        assert found.eta_s == pytest.approx(seconds(rest[row + 1 :]), abs=1e-6)
        assert found.fraction == pytest.approx(seconds(lengths[: num_before + row + 1]) / seconds(lengths))
