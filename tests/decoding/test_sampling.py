"""The target's choice: the right distribution, by noise that is a function of seed, position and token id alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from specextend.core import Asks, SamplingParams
from specextend.decoding.sampling import choose_tokens, gumbel_noise, noise_keys, penalties_of
from tests.tiny_models import request


def slow_probs(logits, sampling):
    """The definition, in Python: rank by probability (then id), cut at top_k, cut at top_p, normalise."""
    top = max(logits)
    weight = {token: math.exp((value - top) / sampling.temperature) for token, value in enumerate(logits)}
    ranked = sorted(weight, key=lambda token: (-logits[token], token))
    ranked = ranked[: sampling.top_k or None]
    total = math.fsum(weight[token] for token in ranked)
    kept = []
    for token in ranked:
        kept.append(token)
        if sampling.top_p < 1 and math.fsum(weight[token] for token in kept) >= sampling.top_p * total:
            break
    total = math.fsum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(logits))]


def slow_choice(logits, position, sampling):
    """One node's token, from one noise vector of its own."""
    noise = gumbel_noise(noise_keys([sampling.seed], torch.tensor([[position]])), torch.arange(len(logits)))[0, 0]
    log_probs = [math.log(p) if p > 0 else -math.inf for p in slow_probs(logits.tolist(), sampling)]
    scores = [p + g for p, g in zip(log_probs, noise.tolist(), strict=True)]
    return scores.index(max(scores))


def splitmix_uniform(seed, position, token_id):
    """The generator's definition on Python integers."""

    def mix(state):
        state &= 2**64 - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    stride = 0x9E3779B97F4A7C15
    key = mix(mix(seed) + position * stride)
    return ((mix(key + token_id * stride) >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("seed", [0, 7, -3, 2**63 + 5, 2**70])
def test_noise_is_the_function_of_seed_position_and_token_that_it_says(seed):
    """Any seed a user may write, big or negative; and int64 tensors must agree with unbounded integers."""
    positions = torch.tensor([0, 1, 131_071])
    tokens = torch.arange(5) * 37_983
    [noise] = gumbel_noise(noise_keys([seed], positions[None]), tokens)
    for row, position in enumerate(positions.tolist()):
        expected = [-math.log(-math.log(splitmix_uniform(seed, position, token))) for token in tokens.tolist()]
        assert noise[row].tolist() == pytest.approx(expected, rel=1e-6)


@given(
    st.lists(st.sampled_from([-math.inf, -2.0, -0.5, 0.0, 0.5, 1.0, 3.0]), max_size=12),
    st.sampled_from([0.05, 0.7, 1.0, 4.0]),
    st.sampled_from([0, 1, 2, 5, 100]),
    st.sampled_from([1e-6, 0.21, 0.53, 0.853, 0.999, 1.0]),
)
@settings(max_examples=300, derandomize=True)
def test_a_choice_follows_the_slow_distribution(logits, temperature, top_k, top_p):
    """Few distinct values make ties, at the cuts as well; there the smaller token id stays.

    A token that the model forbids is never chosen, whatever its noise.
    """
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    rows = torch.tensor([*logits, 0.0]).expand(20, -1)
    expected = [slow_choice(rows[0], position, sampling) for position in range(20)]
    assert choose_tokens(rows[None], torch.arange(20)[None], [sampling]).tolist() == [expected]


def test_a_nucleus_of_any_size_is_found_beside_other_requests():
    """The search looks at 64 tokens, then at 512, then at more: a flat distribution needs nearly all of them."""
    nucleus = {"temperature": 0.7, "top_p": 0.9003}
    ways = [nucleus, nucleus, nucleus, {**nucleus, "top_k": 700}, {"temperature": 1.3}, nucleus]
    spreads = torch.tensor([8.0, 0.0, 0.01, 0.01, 1.0, 1.0])
    sampling = [SamplingParams(seed=b % 3, **way) for b, way in enumerate(ways)]
    rows = spreads[:, None] * torch.randn(6, 2_000, generator=torch.Generator().manual_seed(0))
    expected = [[slow_choice(row, at, each) for at in (5, 6, 6)] for row, each in zip(rows, sampling, strict=True)]
    positions = torch.tensor([[5, 6, 6]]).expand(6, -1)
    assert choose_tokens(rows[:, None].expand(-1, 3, -1), positions, sampling).tolist() == expected


def test_greedy_takes_the_first_of_equal_logits():
    """As `generate(do_sample=False)` does; in bf16 ties are common."""
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.bfloat16)
    assert choose_tokens(logits[None], torch.tensor([[4, 5]]), [SamplingParams()]).tolist() == [[1, 0]]


def test_a_penalty_is_that_of_transformers_on_either_side_of_zero():
    """What is chosen hardly ever shows it: logits below zero are far from the top."""
    logits = torch.linspace(-3, 3, 40)[None]
    seen = [0, 5, 20, 39]
    penalties = penalties_of(request("a", seen, repetition_penalty=1.3), logits.device, Asks())
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), logits.clone())
    assert torch.equal(penalties.apply(logits, seen[-1:], [-1]), expected)
