"""What the draft may see: scores against a slow twin, selections by hand, schedules step by step."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.decoding.decoding_options import CacheOptions
from specextend.decoding.retrieval import (
    CachePolicy,
    chunk_mass,
    scored_layers,
    select_by_score,
    select_recent,
    visible_positions,
)
from specextend.decoding.stock import AttentionLayer
from specextend.stats import DecodingStats
from tests.covering import covering

SMALL = CacheOptions(chunk_size=4, top_k_chunks=4, recent=4, refresh_every=3)


def slow_chunk_mass(query, keys, chunk_size, scale):
    """The definition, in fp64: a softmax for each head, the sum over each chunk, the mean over heads."""
    group = query.shape[0] // keys.shape[0]
    shares = []
    for head in range(query.shape[0]):
        weights = (keys[head // group].double() @ query[head].double() * scale).softmax(0).tolist()
        shares.append([sum(weights[start : start + chunk_size]) for start in range(0, len(weights), chunk_size)])
    return [sum(column) / len(column) for column in zip(*shares, strict=True)]


def mass_of(*chunks):
    return torch.tensor(chunks) / sum(chunks)


@st.composite
def tight_options(draw):
    """The least budget that is accepted, or a little more."""
    values = {name: draw(st.integers(least, 40)) for name, least in (("chunk_size", 1), ("recent", 1))}
    for top_k_chunks in range(1, 100):
        try:
            options = CacheOptions(top_k_chunks=top_k_chunks, **values)
        except ValueError:
            continue
        return replace(options, top_k_chunks=top_k_chunks + draw(st.sampled_from([0, 0, 1, 7])))
    raise AssertionError("no budget is enough")


@pytest.mark.parametrize(
    "heads, num_keys, dtype",
    covering([(4, 4), (9, 3), (8, 1)], [1, 31, 32, 33, 100], [torch.float32, torch.bfloat16]),
)
def test_scores_are_the_targets_attention(heads, num_keys, dtype):
    """Per head a softmax over all committed rows, a sum a chunk, then the mean over heads; GQA included."""
    generator = torch.Generator().manual_seed(num_keys)
    query = (torch.randn(heads[0], 16, generator=generator) * 3).to(dtype)
    keys = torch.randn(heads[1], num_keys, 16, generator=generator).to(dtype)
    mass = chunk_mass(query, keys, 32, 0.25)
    assert mass.tolist() == pytest.approx(slow_chunk_mass(query, keys, 32, 0.25), abs=1e-6)
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=200)
@given(options=tight_options(), num_tokens=st.integers(1, 900), seed=st.integers(0, 9))
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
