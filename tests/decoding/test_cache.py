"""The KV cache: rows are lent and come back, an accepted path is packed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.cache import ALIGNMENT, KVCache, Region, RowAllocator, aligned


def cache_with_row_numbers(num_rows: int) -> KVCache:
    """Every key holds its row's number, every value its negative."""
    cache = KVCache(2, num_rows, 1, 4, torch.float32, torch.device("cpu"))
    numbers = torch.arange(cache.keys.shape[2], dtype=torch.float32)[:, None]
    cache.keys.copy_(numbers.expand_as(cache.keys))
    cache.values.copy_(-numbers.expand_as(cache.values))
    return cache


def rows_of(cache: KVCache) -> list[int]:
    assert torch.equal(cache.keys, -cache.values)
    assert torch.equal(cache.keys[0], cache.keys[1])
    return cache.keys[0, 0, :, 0].int().tolist()


@given(
    num_blocks=st.integers(0, 12),
    actions=st.lists(st.one_of(st.integers(1, 900), st.integers(-20, -1)), max_size=60),
)
def test_regions_never_overlap_and_all_rows_come_back(num_blocks, actions):
    """Two sequences on one row would mix two documents' text; a lost row would shrink every later batch."""
    rows = RowAllocator(num_blocks * ALIGNMENT)
    taken: list[Region] = []
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


def commit(cache: KVCache, first_rows: list[int], paths: list[list[int]]) -> None:
    """Commit paths of a proposal of 56 rows, all padded to the longest as verification pads them."""
    width = max(len(path) for path in paths)
    padded = [[*path, *range(len(path), width)] for path in paths]
    cache.commit(torch.tensor(first_rows)[:, None] + torch.arange(56), torch.tensor(padded))


def test_commit_packs_each_path_behind_its_prefix():
    """Accept and roll back in one verb: rows that are not on the path are free for the next proposal."""
    cache = cache_with_row_numbers(256)
    commit(cache, [10, 100, 200], [[0, 2, 5], [0], [0, 1, 2]])
    rows = rows_of(cache)
    assert rows[10:13] == [10, 12, 15]
    assert rows[:10] == list(range(10)), "the prefix stays"
    assert rows[100:] == list(range(100, 256)), "a root alone and a straight path stay where they are"
