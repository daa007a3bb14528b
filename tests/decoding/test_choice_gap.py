"""The gap says how far two tokens are apart where an output first differs from another one, as an audit asks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from specextend.core import SamplingParams
from specextend.decoding.sampling import FARTHEST, choice_gap, choose_tokens
from tests.tiny_models import random_prompt, request, tiny_engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_output_has_the_gap_of_the_nearest_rival(temperature: float, pairs):
    """None without one. They change no token, and one that is nearer at another place counts instead."""
    engine = tiny_engine(pairs("llama"), decoding__mode="autoregressive", decoding__max_batch_size=3)
    own = request("own", random_prompt(90), 40, temperature=temperature, seed=5)
    [first] = engine.generate([own])
    far, near = [first.token_ids[2] ^ 1], range(100)
    rivals = {"none": {50: [1]}, "one": {2: far}, "two": {2: far, 3: {*near} - {first.token_ids[3]}}}
    given = [replace(own, request_id=name, rivals=each) for name, each in rivals.items()]
    found = {each.request_id: each for each in engine.generate(given)}
    assert all(each.token_ids == first.token_ids for each in found.values())
    assert found["none"].gap is None
    assert found["one"].gap >= found["two"].gap > 0


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}],
    ids=str,
)
def test_the_gap_is_the_change_that_reverses_a_choice(sampling):
    """Raised by a little more than the gap the other token wins, or the winner, lowered by it, loses; by less, not."""
    params = SamplingParams(**sampling, seed=3)
    generator = torch.Generator().manual_seed(0)
    for position in range(40):
        logits, at = torch.randn(50, generator=generator), torch.tensor(position)
        chosen = int(choose_tokens(logits[None], at[None], params))
        other = int((logits - logits.max() * torch.nn.functional.one_hot(torch.tensor(chosen), 50)).argmax())
        gap = choice_gap(logits, at, params, chosen, other)
        shifts = torch.zeros(3, 50)
        shifts[0, other], shifts[1, chosen], shifts[2, other] = gap + 1e-4, -gap - 1e-4, 0.99 * gap - 1e-4
        raised, lowered, too_little = (int(choose_tokens((logits + shift)[None], at[None], params)) for shift in shifts)
        assert raised == other or lowered != chosen
        assert too_little != other


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "top_p": 0.9}], ids=str)
def test_a_token_that_cannot_be_chosen_is_as_far_away_as_a_report_can_say(sampling):
    """One that a penalty forbids, or far outside the nucleus: infinity is no JSON."""
    logits = torch.tensor([30.0, -30.0, -torch.inf])
    near, banned = (choice_gap(logits, torch.tensor(3), SamplingParams(**sampling), 0, other) for other in (1, 2))
    assert math.isfinite(near)
    assert 5 < near <= banned <= FARTHEST
