"""The queue of documents, against one that is sorted anew for every question."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specextend.cluster.leases import Waiting, rank
from specextend.core import DocumentKey

DOCUMENTS = st.builds(DocumentKey, st.integers(0, 3), st.integers(0, 20))


@given(st.lists(st.tuples(DOCUMENTS, st.integers(1, 50)) | st.frozensets(st.integers(0, 3)), max_size=60))
def test_what_is_taken_is_the_first_of_the_files_that_may_be(steps: list) -> None:
    """Whatever was put, taken and passed over before, and put again after it was taken."""
    queue, naive = Waiting(), {}
    for step in steps:
        if isinstance(step, tuple):
            key, num_tokens = step
            if key not in naive:
                queue.put(key, num_tokens)
                naive[key] = rank(num_tokens, key)
        else:
            expected = min((entry for key, entry in naive.items() if key.file not in step), default=None)
            taken = queue.take(but_of=step)
            assert taken == (expected[1] if expected else None)
            naive.pop(taken, None)
        assert len(queue) == len(naive)
        assert queue.keys() == [key for _, key in sorted(naive.values())]
