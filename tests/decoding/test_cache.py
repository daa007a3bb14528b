"""The KV cache: rows are lent and come back, an accepted path is packed."""

from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.cache import ALIGNMENT, Region, RowAllocator, aligned


@given(
    num_blocks=st.integers(0, 12),
    actions=st.lists(st.one_of(st.integers(1, 900), st.integers(-20, -1)), max_size=60),
)
def test_regions_never_overlap_and_all_rows_come_back(num_blocks, actions):
    """Two sequences on one row would mix two documents' text; a lost row would shrink every later batch."""
    rows = RowAllocator(num_blocks * ALIGNMENT)
    taken = []
    for action in actions:
        if action < 0:
            if taken:
                rows.give_back(taken.pop(action % len(taken)))
            continue
        region = rows.take(action)
        if region is not None:
            assert region.size == aligned(action)
            assert region.start % ALIGNMENT == 0
            assert region.start >= 0
            assert region.start + region.size <= num_blocks * ALIGNMENT
            assert all(r.start + r.size <= region.start or region.start + region.size <= r.start for r in taken)
            taken.append(region)
        assert rows.num_free == num_blocks * ALIGNMENT - sum(region.size for region in taken)
    for region in taken:
        rows.give_back(region)
    assert num_blocks == 0 or rows.take(num_blocks * ALIGNMENT) == Region(0, num_blocks * ALIGNMENT), "in one piece"
