"""Sampled output follows the target's own distribution."""

from collections import Counter

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from tests.tiny_models import (
    EOS_TOKEN_ID,
    FAMILIES,
    load_reference,
    random_prompt,
    request,
    tiny_engine,
    write_pair,
)

TEMPERATURE = 0.7
TOP_P = 0.9
SMALL_VOCABULARY = 7
NUM_SEEDS = 600


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A vocabulary of seven: the joint distribution of two tokens has few cells."""
    return write_pair(tmp_path_factory.mktemp("small"), FAMILIES["llama"], seed=7, vocab_size=SMALL_VOCABULARY)


def processed(model, prompts):
    """[n, V] next-token probabilities after temperature and top-p, as transformers processes them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P)])
    logits = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    return warpers(torch.tensor(prompts), logits.double()).softmax(-1)


def joint_distribution(model, prompt, num_tokens):
    """Output -> probability, over all outputs of `num_tokens` tokens or up to an EOS."""
    joint = {(): 1.0}
    for _ in range(num_tokens):
        grown = {}
        for tokens, weight in joint.items():
            if tokens[-1:] == (EOS_TOKEN_ID,):
                grown[tokens] = weight
                continue
            [probs] = processed(model, [prompt + list(tokens)]).tolist()
            grown |= {(*tokens, token_id): weight * p for token_id, p in enumerate(probs) if p > 0}
        joint = grown
    return joint


def chi_square_p(counts, joint):
    """Probability of counts at least this far from the distribution; rare cells are joined."""
    total = counts.total()
    rare = {cell for cell, p in joint.items() if p * total < 5}
    cells = [{cell} for cell in joint.keys() - rare] + ([rare] if rare else [])
    statistic = 0.0
    for cell in cells:
        expected = total * sum(joint[each] for each in cell)
        statistic += (sum(counts[each] for each in cell) - expected) ** 2 / expected
    halves = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


@pytest.mark.parametrize(
    "policy, draft",
    [("full", "bad"), ("streaming", "eagle"), ("retrieval", "merged-good")],
)
@torch.no_grad()
def test_samples_follow_the_targets_joint_distribution(policy, draft, small):
    """Whatever the draft proposes: top-k children are no samples, and rejection by p/q would be biased here."""
    prompt = random_prompt(60, vocab_size=SMALL_VOCABULARY)
    joint = joint_distribution(load_reference(small), prompt, 2)
    engine = tiny_engine(small, draft, cache__policy=policy, decoding__max_batch_size=16)
    requests = [
        request(str(seed), prompt, 2, seed=seed, temperature=TEMPERATURE, top_p=TOP_P) for seed in range(NUM_SEEDS)
    ]
    counts = Counter(tuple(completion.token_ids) for completion in engine.generate(requests))
    assert set(counts) <= set(joint), "nothing that top-p leaves out"
    assert chi_square_p(counts, joint) > 0.001
