"""The lead says by how much a token was chosen, by which an audit tells rounding from a fault."""

from dataclasses import replace

import pytest
import torch

from specextend.core import SamplingParams
from specextend.decoding.sampling import FARTHEST, choose_tokens, lead_of
from tests.tiny_models import random_prompt, request, tiny_engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_leads_change_no_token_and_each_token_has_one(pairs, temperature):
    """A plain request draws the noise of one that drafts, and says beside it how near another choice was."""
    engine = tiny_engine(pairs("llama"), "good")
    drafting = request("a", random_prompt(90), 40, temperature=temperature, seed=5)
    plainly = replace(drafting, request_id="b", drafts=False)
    asked = [drafting, plainly, replace(plainly, request_id="c", keeps_leads=True)]
    drafted, plain, with_leads = sorted(engine.generate(asked), key=lambda each: each.request_id)
    assert drafted.token_ids == plain.token_ids == with_leads.token_ids
    assert drafted.stats.num_spec_steps > plain.stats.num_spec_steps == with_leads.stats.num_spec_steps == 0
    assert len(with_leads.leads) == len(with_leads.token_ids)
    assert plain.leads == ()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}], ids=str)
def test_the_lead_is_the_change_that_reverses_a_choice(sampling):
    """Lowered by a little more than its lead a token loses, by less it wins."""
    params = SamplingParams(**sampling, seed=3)
    generator = torch.Generator().manual_seed(0)
    for position in range(40):
        logits = torch.randn(50, generator=generator)
        at = torch.tensor(position)
        chosen = int(choose_tokens(logits[None, None], at[None, None], [params]))
        lead = lead_of(logits, at, params, chosen)
        for shift, wins in ((lead + 1e-4, False), (0.99 * lead - 1e-4, True)):
            shifted = logits.clone()
            shifted[chosen] -= shift
            assert (int(choose_tokens(shifted[None, None], at[None, None], [params])) == chosen) == wins


def test_a_token_without_alternative_leads_by_as_much_as_a_report_can_say():
    """Infinity is no JSON."""
    assert lead_of(torch.tensor([3.0, -torch.inf]), torch.tensor(3), SamplingParams(), 0) == FARTHEST
