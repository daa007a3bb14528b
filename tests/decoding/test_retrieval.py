"""What the draft may see: selections by hand, and their figures; `test_reference.py` follows whole outputs."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.decoding.decoding_options import CacheOptions
from specextend.decoding.retrieval import (
    CachePolicy,
    scored_layers,
    select_by_score,
    select_recent,
    visible_positions,
)
from specextend.decoding.stock import AttentionLayer
from specextend.stats import DecodingStats

SMALL = CacheOptions(chunk_size=4, top_k_chunks=4, recent=4, refresh_every=3)


def mass_of(*chunks):
    return torch.tensor(chunks) / sum(chunks)


TIGHT = [
    CacheOptions(chunk_size=size, recent=recent, top_k_chunks=budget)
    for size, recent, budget in ((1, 3, 4), (4, 4, 3), (4, 5, 3), (4, 6, 11), (8, 16, 4), (32, 1, 5))
]
"""Budgets that hold little more than the forced chunks."""


@settings(max_examples=200)
@given(options=st.sampled_from(TIGHT), num_tokens=st.integers(1, 900), seed=st.integers(0, 9))
def test_the_first_chunk_the_recent_ones_and_the_best_others_are_visible_within_the_budget(options, num_tokens, seed):
    """`top_k_chunks` counts every visible chunk; a chunk more would not fit the rows that the draft was given.

    The recent window is rarely aligned to chunks: with 5 tokens in chunks of 4 it can touch three of them.
    """
    size = options.chunk_size
    every = range(-(-num_tokens // size))
    mass = torch.rand(len(every), generator=torch.Generator().manual_seed(seed))
    chunks = select_by_score(mass / mass.sum(), num_tokens, options)
    forced = {0, *range(max(0, num_tokens - options.recent) // size, len(every))}
    others = sorted({*every} - forced, key=lambda chunk: -mass[chunk])
    wanted = sorted([*forced, *others[: options.top_k_chunks - len(forced)]])
    assert chunks.tolist() == wanted, "the public code drops the open chunk when it scores low"
    visible = [range(chunk * size, min((chunk + 1) * size, num_tokens)) for chunk in wanted]
    assert visible_positions(chunks, num_tokens, size).tolist() == [*chain(*visible)]


@given(
    num_tokens=st.integers(1, 500),
    chunk_size=st.integers(1, 20),
    top_k=st.integers(1, 20),
)
def test_streaming_keeps_the_first_chunk_and_the_newest_within_the_same_budget(num_tokens, chunk_size, top_k):
    """Whole chunks, the newest always among them, the first as far as the budget allows."""
    options = CacheOptions(policy="streaming", chunk_size=chunk_size, top_k_chunks=top_k)
    chunks = select_recent(num_tokens, options).tolist()
    total = -(-num_tokens // chunk_size)
    num_recent = min(total, top_k) - (top_k > 1)
    assert chunks == [0] * (top_k > 1) + list(range(total - num_recent, total))


def test_coverage_and_churn_by_hand():
    """Coverage counts forced chunks, churn does not; the retrieval of prefill has coverage and no churn."""
    policy = CachePolicy(SMALL)
    stats = DecodingStats()
    policy.select(28, mass_of(10, 30, 20, 20, 5, 5, 10), stats)  # 0, 1, 2, 6
    assert stats.num_retrievals == 1
    assert stats.retrieval_churn is None
    assert stats.retrieval_coverage == pytest.approx(0.7)
    policy.select(28, mass_of(10, 30, 0, 30, 5, 5, 20), stats)  # 0, 1, 3, 6: one of {1, 2} stays, of three in all
    assert stats.num_retrievals == 2
    assert stats.retrieval_coverage == pytest.approx((0.7 + 0.9) / 2)
    assert stats.retrieval_churn == pytest.approx(1 - 1 / 3)
    policy.select(28, mass_of(10, 30, 0, 30, 5, 5, 20), stats)
    assert stats.retrieval_churn == pytest.approx((2 / 3 + 0) / 2)


@pytest.mark.parametrize("chunk_size, recent, least", [(4, 4, 3), (4, 1, 2), (4, 5, 3), (4, 6, 4), (1, 3, 4)])
def test_a_budget_that_forced_chunks_alone_can_exceed_is_refused(chunk_size, recent, least):
    """By the worst alignment: 4 recent tokens can touch two chunks of 4, 6 can touch three."""
    values = {"chunk_size": chunk_size, "recent": recent}
    assert CacheOptions(top_k_chunks=least, **values).top_k_chunks == least
    with pytest.raises(ValueError, match=r"cache\.top_k_chunks is \d+ but the first chunk and cache\.recent alone"):
        CacheOptions(top_k_chunks=least - 1, **values)


WHOLE = AttentionLayer(2, 16)
WINDOWED = AttentionLayer(2, 16, window=8)


@pytest.mark.parametrize(
    "named, layers", [((-1,), (29,)), ((0, 15, -1), (0, 15, 29)), ((29, -1), (29,)), ((-30,), (0,)), ((), (29,))]
)
def test_layers_are_counted_from_either_end(named, layers):
    """A layer that is named twice has one voice; without retrieval none is kept."""
    assert scored_layers(CacheOptions(score_layers=named), [WHOLE] * 30) == layers
    assert scored_layers(CacheOptions(score_layers=named, policy="streaming"), [WHOLE] * 30) == ()


@pytest.mark.parametrize("layer", [30, -31])
def test_a_layer_that_the_target_lacks_is_refused(layer):
    """Python would count a list's end for it, or fail in the middle of the first document."""
    with pytest.raises(ValueError, match=rf"cache\.score_layers names layer {layer}, but the target has 30"):
        scored_layers(CacheOptions(score_layers=(-1, layer)), [WHOLE] * 30)


def test_only_layers_that_see_the_whole_text_score_it():
    """A window gives each chunk before it a share of nothing, and the draft would see the end alone."""
    layers = [WHOLE, WINDOWED, AttentionLayer()]
    assert scored_layers(CacheOptions(), layers) == (0,)
    for named in (1, -1):
        with pytest.raises(ValueError, match=f"layer {named}, which does not attend to the whole text; 0 of"):
            scored_layers(CacheOptions(score_layers=(named,)), layers)
    with pytest.raises(ValueError, match=r"no layer of the target attends to the whole text: set cache\.policy"):
        scored_layers(CacheOptions(), layers[1:])
    assert scored_layers(CacheOptions(policy="streaming"), layers[1:]) == ()
