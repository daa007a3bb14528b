"""A plain decoding beside the summaries finds a wrong verifier, and is silent on ours."""

import math

import pytest
import torch

from specextend.cluster.exits import EXIT_DONE, Interrupt
from specextend.cluster.run import run
from specextend.config import RunConfig
from specextend.core import Request, SamplingParams
from specextend.data.audit_rows import read_audits
from specextend.data.storage import resolve
from specextend.decoding import verification as verification_module
from specextend.decoding.sampling import FARTHEST, choice_gap, choose_tokens
from specextend.loading import load_engine
from tests.contract.conftest import kept_kernels as kept_kernels
from tests.covering import covering
from tests.faults.conftest import real_job as real_job
from tests.job.conftest import CONFIG, rows
from tests.tiny_models import random_prompt, request, tiny_engine

DRAFTS = ("good", "merged-eagle")
NEW = 40
LENGTHS = (200, 37, 90)


def decode(engine, requests):
    return {each.request_id: each for each in engine.generate(requests)}


def audited(engine, **sampling):
    """The agreement of each request with a plain decoding in the same engine."""
    requests = [request(str(length), random_prompt(length), NEW, **sampling) for length in LENGTHS]
    first = decode(engine, requests)
    again = [
        Request(
            request_id=each.request_id,
            prompt_token_ids=each.prompt_token_ids,
            max_new_tokens=NEW,
            sampling=SamplingParams(**sampling),
            audit_of=tuple(first[each.request_id].token_ids),
        )
        for each in requests
    ]
    second = decode(engine, again)
    assert all(each.stats.num_spec_steps == 0 for each in second.values()), "it takes plain steps"
    return [(len(first[name].token_ids), second[name].agreement) for name in map(str, LENGTHS)]


@pytest.mark.parametrize(
    ("draft", "batch", "temperature", "policy"), covering(DRAFTS, [1, 3], [0.0, 0.8], ["full", "retrieval"])
)
def test_ours_is_the_targets_own_token_for_token(draft, batch, temperature, policy, pair):
    engine = tiny_engine(pair, draft, decoding__max_batch_size=batch, cache__policy=policy)
    for num_tokens, agreement in audited(engine, temperature=temperature, seed=5, top_p=0.9):
        assert agreement.num_equal_tokens == num_tokens
        assert agreement.gap is None


right = verification_module.verify


def accept_the_first_child(token_ids, parents, chosen, max_depth):
    """A verifier that takes the draft's word for one token a step."""
    found = right(token_ids, parents, chosen, max_depth)
    if token_ids.shape[1] == 1 or found[1][0, 1] >= 0:
        return found
    return right(token_ids, parents, torch.cat([token_ids[:, 1:2], chosen[:, 1:]], 1), max_depth)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_wrong_verifier_is_found(temperature, pair, monkeypatch):
    """The gaps are those of another token, not of rounding."""
    monkeypatch.setattr(verification_module, "verify", accept_the_first_child)
    found = audited(tiny_engine(pair, "bad"), temperature=temperature, seed=5)
    assert all(agreement.num_equal_tokens < num_tokens for num_tokens, agreement in found)
    assert max(agreement.gap for _, agreement in found) > 0.5


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


@pytest.mark.slow
def test_a_job_audits_its_sample_and_changes_nothing(real_job):
    """Rows of the audit stand beside the parts; the summaries are those of a run without."""
    config = RunConfig.load(CONFIG, [*real_job.settings(), "decoding.audit_fraction=1", "decoding.max_batch_size=3"])
    assert run(config, real_job.screen, Interrupt(600.0), factory=load_engine) == EXIT_DONE
    done = rows(real_job.output / "summaries")
    found = read_audits(resolve(str(real_job.output))).to_pylist()
    assert sorted(row["doc_id"] for row in found) == sorted(row["doc_id"] for row in done)
    sizes = {row["doc_id"]: row["num_output_tokens"] for row in done}
    assert all(row["num_equal_tokens"] == row["num_tokens"] == sizes[row["doc_id"]] for row in found)
    assert {row["batch_size"] for row in found} == {3}, "twelve documents in batches like the job's"
    assert all(row["plain_s"] > 0 for row in found)
