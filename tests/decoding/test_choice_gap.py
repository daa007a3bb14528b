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
@pytest.mark.parametrize(
    "schema", ["", '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}']
)
def test_an_output_has_a_gap_where_it_differs_from_another(temperature: float, schema: str, pairs):
    """None beside itself; beside another, one that is that of the first token, whatever follows."""
    engine = tiny_engine(pairs("llama"), decoding__mode="autoregressive", decoding__max_batch_size=3)
    own = replace(request("own", random_prompt(90), 40, temperature=temperature, seed=5), schema=schema)
    [first] = engine.generate([own])
    tokens = first.token_ids
    others = {"same": tokens, "third": [*tokens[:2], tokens[2] ^ 1, 7, 7], "first": [tokens[0] ^ 1, 7]}
    found = {
        each.request_id: each
        for each in engine.generate(
            [replace(own, request_id=name, compared_with=tuple(other)) for name, other in others.items()]
        )
    }
    assert all(each.token_ids == tokens for each in found.values())
    assert found["same"].gap is None
    assert found["third"].gap > 0
    assert found["first"].gap > 0


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
