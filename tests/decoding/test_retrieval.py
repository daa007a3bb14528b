"""What the draft may see: scores against a slow twin, selections by hand, schedules step by step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specextend.decoding.chunks import Chunks, pack
from specextend.decoding.options import CacheOptions
from specextend.decoding.retrieval import (
    CachePolicy,
    chunk_mass,
    mean_mass,
    scored_layers,
    select_by_score,
    select_recent,
)
from specextend.stats import DecodingStats

SMALL = CacheOptions(chunk_size=4, top_k_chunks=4, sinks=4, recent=4, refresh_every=3)


def slow_chunk_mass(query: Tensor, keys: Tensor, edges: list[int], scale: float, heads: str = "mean") -> list[float]:
    """The definition, in fp64: softmax a head, sum over each chunk; then mean or largest over heads, to a sum of 1."""
    group = query.shape[0] // keys.shape[1]
    shares = []
    for head in range(query.shape[0]):
        weights = (keys[:, head // group].double() @ query[head].double() * scale).softmax(0).tolist()
        shares.append([sum(weights[start:end]) for start, end in itertools.pairwise(edges)])
    columns = list(zip(*shares, strict=True))
    mass = [sum(column) / len(column) if heads == "mean" else max(column) for column in columns]
    return [share / sum(mass) for share in mass]


def edges_of(num_tokens: int, chunk_size: int = 4) -> Tensor:
    return Chunks(chunk_size).edges(num_tokens)


def mass_of(*chunks: float) -> Tensor:
    return torch.tensor(chunks) / sum(chunks)


@st.composite
def tight_options(draw) -> CacheOptions:
    """The least budget that is accepted, or a little more."""
    values = {name: draw(st.integers(least, 40)) for name, least in (("chunk_size", 1), ("sinks", 0), ("recent", 1))}
    for top_k_chunks in range(1, 100):
        try:
            options = CacheOptions(top_k_chunks=top_k_chunks, **values)
        except ValueError:
            continue
        return replace(options, top_k_chunks=top_k_chunks + draw(st.sampled_from([0, 0, 1, 7])))
    raise AssertionError("no budget is enough")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_keys", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_scores_are_the_targets_attention(how, heads, num_keys, dtype):
    """Per head a softmax over all committed rows, a sum a chunk, then mean or largest over heads; GQA included."""
    generator = torch.Generator().manual_seed(num_keys)
    query = (torch.randn(heads[0], 16, generator=generator) * 3).to(dtype)
    keys = torch.randn(num_keys, heads[1], 16, generator=generator).to(dtype)
    for chunks in (Chunks(32), Chunks(32, torch.tensor([0, min(num_keys, 7), num_keys]).unique())):
        mass = chunk_mass(query, keys, chunks, 0.25, how)
        expected = slow_chunk_mass(query, keys, chunks.edges(num_keys).tolist(), 0.25, how)
        assert mass.tolist() == pytest.approx(expected, abs=1e-6)
        assert float(mass.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_heavy_sink_does_not_blur_the_rest():
    """Half-precision running sums lose 24% of the best chunks at 16K; fp32 sums of segments lose none."""
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 32, generator=generator), torch.randn(16_384, 1, 32, generator=generator)
    keys[0] = query[0] * 3
    mass = chunk_mass(query, keys.bfloat16(), Chunks(32), 32**-0.5)
    slow = slow_chunk_mass(query, keys.bfloat16(), edges_of(len(keys), 32).tolist(), 32**-0.5)
    exact = torch.tensor(slow, dtype=torch.float64)
    assert float(exact[0]) > 0.3
    assert set(mass.topk(32).indices.tolist()) == set(exact.topk(32).indices.tolist())


def test_the_best_chunks_stay_beside_the_forced_ones_in_document_order():
    """Sink chunk 0 and last chunk 6 are forced though worthless; two more places go to the best others."""
    selection = select_by_score(mass_of(0, 5, 1, 7, 2, 6, 0), edges_of(28), SMALL)
    assert selection.chunks.tolist() == [0, 3, 5, 6]
    assert selection.by_score() == {3, 5}
    assert selection.positions(edges_of(28)).tolist() == [0, 1, 2, 3, *range(12, 16), *range(20, 28)]


def test_the_newest_tokens_are_visible_though_nobody_attends_to_them():
    """The public code drops the open chunk when it scores low, and the draft no longer sees what it just said."""
    selection = select_by_score(mass_of(1, 5, 5, 5, 5, 0, 0), edges_of(26), SMALL)
    assert selection.chunks.tolist() == [0, 1, 5, 6], "the last 4 tokens reach into chunk 5"
    assert selection.positions(edges_of(26)).tolist()[-6:] == [20, 21, 22, 23, 24, 25]


def test_a_tie_goes_to_the_earlier_chunk():
    assert select_by_score(mass_of(1, 1, 1, 1, 1, 1, 1), edges_of(28), SMALL).chunks.tolist() == [0, 1, 2, 6]


def test_where_all_fits_all_is_visible():
    """Scores decide nothing then, so `retrieval` is `full`."""
    for num_tokens in range(1, 17):
        edges = edges_of(num_tokens)
        mass = mass_of(*[1] * (len(edges) - 1))
        assert select_by_score(mass, edges, SMALL).positions(edges).tolist() == list(range(num_tokens))


@settings(deadline=None, max_examples=200)
@given(options=tight_options(), num_tokens=st.integers(1, 900), seed=st.integers(0, 9))
def test_the_budget_holds_for_every_length(options, num_tokens, seed):
    """`top_k_chunks` counts every visible chunk; a chunk more would not fit the rows that the draft was given.

    The recent window is rarely aligned to chunks: with 5 tokens in chunks of 4 it can touch three of them.
    """
    edges = edges_of(num_tokens, options.chunk_size)
    total = len(edges) - 1
    mass = torch.rand(total, generator=torch.Generator().manual_seed(seed))
    selection = select_by_score(mass / mass.sum(), edges, options)
    assert len(selection.chunks) == min(total, options.top_k_chunks)
    visible = selection.positions(edges).tolist()
    assert visible == sorted(set(visible))
    wanted = {*range(min(options.sinks, num_tokens)), *range(max(0, num_tokens - options.recent), num_tokens)}
    assert wanted <= set(visible)


@settings(deadline=None, max_examples=100)
@given(options=tight_options(), num_prompt=st.integers(1, 400), num_new=st.integers(0, 90), data=st.data())
def test_the_budget_holds_for_sentences_too(options, num_prompt, num_new, data):
    """The draft's rows are counted in tokens: shorter chunks are more chunks, never more tokens than planned for."""
    ends = sorted(data.draw(st.sets(st.integers(1, num_prompt), max_size=40)))
    chunks = Chunks(options.chunk_size, torch.tensor(pack(ends, num_prompt, options.chunk_size)))
    tight = replace(options, chunk_boundaries="sentence", top_k_chunks=options.top_k_chunks + (options.sinks > 0))
    edges = chunks.edges(num_prompt + num_new)
    mass = torch.rand(len(edges) - 1, generator=torch.Generator().manual_seed(num_prompt))
    visible = select_by_score(mass / mass.sum(), edges, tight).positions(edges).tolist()
    budget = tight.top_k_chunks * tight.chunk_size
    assert len(visible) <= budget
    assert len(visible) == num_prompt + num_new or len(visible) > budget - tight.chunk_size
    wanted = {*range(min(options.sinks, num_prompt)), *range(edges[-1])[-options.recent :]}
    assert wanted <= set(visible)


@settings(deadline=None)
@given(
    num_tokens=st.integers(1, 500),
    chunk_size=st.integers(1, 20),
    top_k=st.integers(1, 20),
    sinks=st.integers(0, 60),
)
def test_streaming_keeps_sinks_and_the_newest_within_the_same_budget(num_tokens, chunk_size, top_k, sinks):
    """Whole chunks, the newest always among them, the sinks as far as the budget allows."""
    options = CacheOptions(policy="streaming", chunk_size=chunk_size, top_k_chunks=top_k, sinks=sinks)
    chunks = select_recent(edges_of(num_tokens, chunk_size), options).chunks.tolist()
    total = -(-num_tokens // chunk_size)
    num_sinks = min(-(-sinks // chunk_size), top_k - 1, total)
    assert len(chunks) == min(total, top_k)
    assert chunks[:num_sinks] == list(range(num_sinks))
    assert chunks[num_sinks:] == list(range(total - (len(chunks) - num_sinks), total))


def test_streaming_drops_whole_chunks_so_slots_move_once_a_chunk():
    """Every move turns every visible key; between two drops rows are only appended."""
    policy = CachePolicy(CacheOptions(policy="streaming", chunk_size=4, top_k_chunks=3, sinks=4, recent=4))
    stats = DecodingStats()
    visible = policy.select(18, None, stats).tolist()
    assert visible == [0, 1, 2, 3, *range(12, 18)]
    due = [num_tokens for num_tokens in range(19, 23) if policy.is_due(num_tokens)]
    assert due == [22]
    assert policy.select(22, None, stats).tolist() == [0, 1, 2, 3, *range(16, 22)]
    assert not policy.is_due(23)
    assert stats == DecodingStats(), "nothing was retrieved"
    assert not policy.needs_scores


def test_full_shows_everything_and_never_asks_again():
    policy = CachePolicy(CacheOptions(policy="full"))
    assert policy.select(1000, None, DecodingStats()).tolist() == list(range(1000))
    policy.observe(0)
    assert not any(policy.is_due(1000 + n) for n in range(200))


def due_steps(options: CacheOptions, accepted: list[int]) -> list[int]:
    """The steps after which a selection is due, each one being made."""
    policy, stats, due = CachePolicy(options), DecodingStats(), []
    policy.select(28, mass_of(*[1] * 7), stats)
    for step, count in enumerate(accepted, start=1):
        policy.observe(count)
        if policy.is_due(28):
            due.append(step)
            policy.select(28, mass_of(*[1] * 7), stats)
    return due


def test_every_n_steps_is_every_n_steps():
    """Counted from the last selection, the one of prefill included."""
    assert due_steps(SMALL, [0, 3, 1] * 4) == [3, 6, 9, 12]


def test_once_is_once():
    assert due_steps(CacheOptions(refresh="once", chunk_size=4, sinks=4, recent=4), [5, 0, 0, 0] * 20) == []


def test_acceptance_asks_when_the_draft_loses_the_thread():
    """Steady acceptance, good or bad, needs no new view; a fall does, and after it steady is steady again."""
    options = CacheOptions(refresh="acceptance", chunk_size=4, sinks=4, recent=4)
    assert due_steps(options, [4] * 40) == []
    assert due_steps(options, [0] * 40) == []
    falling = due_steps(options, [4] * 20 + [0] * 30)
    assert len(falling) == 1
    assert 20 < falling[0] <= 23
    assert due_steps(options, [4, 0, 0, 0, 0, 0, 0]) == [], "not before eight steps: too few to tell"


def test_plain_steps_count_for_the_schedule_and_not_for_acceptance():
    """After a pause the view is as old as the text since it; what a plain step accepts says nothing."""
    policy = CachePolicy(SMALL)
    policy.select(28, mass_of(*[1] * 7), DecodingStats())
    due = []
    for _ in range(4):
        policy.observe_plain()
        due.append(policy.is_due(28))
    assert due == [False, False, True, True], "it stays due until somebody can select"
    policy = CachePolicy(CacheOptions(refresh="acceptance", chunk_size=4, sinks=4, recent=4))
    policy.select(28, mass_of(*[1] * 7), DecodingStats())
    policy.observe(4)
    for _ in range(20):
        policy.observe_plain()
    assert not policy.is_due(28)


def test_coverage_asks_when_the_target_looks_elsewhere():
    """Looked at every 3 steps; new text is visible and may take attention, a chunk that was not chosen may not."""
    policy, stats = CachePolicy(replace(SMALL, refresh="coverage")), DecodingStats()
    first = mass_of(10, 30, 20, 20, 5, 5, 10)  # 0, 1, 2, 6 are visible: 0.7
    assert not policy.still_covers(first), "nothing is selected yet"
    policy.select(28, first, stats)
    due = []
    for _ in range(3):
        policy.observe(0)
        due.append(policy.is_due(28))
    assert due == [False, False, True]
    assert policy.still_covers(mass_of(5, 27, 15, 30, 7, 6, 10)), "0.57 is above four fifths of 0.7"
    assert not policy.is_due(28), "the next look is three steps away"
    assert policy.still_covers(mass_of(5, 5, 6, 30, 7, 6, 10, 31)), "the eighth chunk came after the selection"
    assert not policy.still_covers(mass_of(5, 25, 15, 31, 7, 7, 10))


@pytest.mark.parametrize("refresh", ["every", "acceptance", "once"])
def test_other_schedules_do_not_look_at_coverage(refresh):
    """What is due there is a new selection."""
    policy = CachePolicy(replace(SMALL, refresh=refresh))
    mass = mass_of(*[1] * 7)
    policy.select(28, mass, DecodingStats())
    assert not policy.still_covers(mass)


def test_coverage_and_churn_by_hand():
    """Coverage counts forced chunks, churn does not; the retrieval of prefill has coverage and no churn."""
    policy, stats = CachePolicy(SMALL), DecodingStats()
    policy.select(28, mass_of(10, 30, 20, 20, 5, 5, 10), stats)  # 0, 1, 2, 6
    assert (stats.num_retrievals, stats.retrieval_churn) == (1, None)
    assert stats.retrieval_coverage == pytest.approx(0.7)
    policy.select(28, mass_of(10, 30, 0, 30, 5, 5, 20), stats)  # 0, 1, 3, 6: one of {1, 2} stays, of three in all
    assert stats.num_retrievals == 2
    assert stats.retrieval_coverage == pytest.approx((0.7 + 0.9) / 2)
    assert stats.retrieval_churn == pytest.approx(1 - 1 / 3)
    policy.select(28, mass_of(10, 30, 0, 30, 5, 5, 20), stats)
    assert stats.retrieval_churn == pytest.approx((2 / 3 + 0) / 2)


def test_coverage_is_a_share_and_never_above_one():
    """Shares in fp32 may add up to a little more."""
    policy, stats = CachePolicy(SMALL), DecodingStats()
    policy.select(8, mass_of(1, 1) * 1.000001, stats)
    assert stats.retrieval_coverage == 1


def test_where_nothing_is_left_to_choose_nothing_churns():
    """All visible chunks forced: the union is empty, and that is no change."""
    policy, stats = CachePolicy(SMALL), DecodingStats()
    for _ in range(2):
        policy.select(8, mass_of(1, 1), stats)
    assert stats.retrieval_churn == 0
    assert math.isclose(stats.retrieval_coverage or 0, 1)


@pytest.mark.parametrize(
    ("chunk_size", "sinks", "recent", "least"), [(4, 4, 4, 3), (4, 0, 1, 1), (4, 1, 5, 3), (4, 8, 6, 5), (1, 2, 3, 5)]
)
def test_a_budget_that_forced_chunks_alone_can_exceed_is_refused(chunk_size, sinks, recent, least):
    """By the worst alignment: 4 recent tokens can touch two chunks of 4, 6 can touch three."""
    values = {"chunk_size": chunk_size, "sinks": sinks, "recent": recent}
    assert CacheOptions(top_k_chunks=least, **values).top_k_chunks == least
    if least > 1:
        with pytest.raises(ValueError, match=r"cache\.top_k_chunks is \d+ but cache\.sinks and cache\.recent alone"):
            CacheOptions(top_k_chunks=least - 1, **values)


@pytest.mark.parametrize(
    ("named", "layers"), [((-1,), (29,)), ((0, 15, -1), (0, 15, 29)), ((29, -1), (29,)), ((-30,), (0,))]
)
def test_layers_are_counted_from_either_end(named, layers):
    """A layer that is named twice has one voice; without retrieval none is kept."""
    assert scored_layers(CacheOptions(score_layers=named), 30) == layers
    assert scored_layers(CacheOptions(score_layers=named, policy="streaming"), 30) == ()


@pytest.mark.parametrize("layer", [30, -31])
def test_a_layer_that_the_target_lacks_is_refused(layer):
    """Python would count a list's end for it, or fail in the middle of the first document."""
    with pytest.raises(ValueError, match=rf"cache\.score_layers names layer {layer}, but the target has 30"):
        scored_layers(CacheOptions(score_layers=(-1, layer)), 30)


def test_several_layers_are_trusted_alike():
    """The mean of their shares: a layer with sharper logits does not outvote the others."""
    generator = torch.Generator().manual_seed(0)
    queries = [torch.randn(4, 8, generator=generator) * scale for scale in (1, 9)]
    keys = [torch.randn(50, 2, 8, generator=generator) for _ in queries]
    for how in ("mean", "max"):
        each = [slow_chunk_mass(*layer, edges_of(50).tolist(), 0.5, how) for layer in zip(queries, keys, strict=True)]
        expected = [sum(shares) / 2 for shares in zip(*each, strict=True)]
        assert mean_mass(queries, keys, Chunks(4), 0.5, how).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"score_heads": "median"}, r"cache\.score_heads must be one of mean, max"),
        ({"chunk_boundaries": "line"}, r"cache\.chunk_boundaries must be one of fixed, sentence"),
        ({"score_layers": ()}, r"cache\.score_layers must name a layer"),
    ],
)
def test_a_mistyped_choice_is_refused(option, message):
    with pytest.raises(ValueError, match=message):
        CacheOptions(**option)
