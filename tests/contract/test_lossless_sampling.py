"""Sampled output equals autoregressive sampling with the same seed, and follows the target's own distribution."""

import itertools
from collections import Counter

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from tests.reference_outputs import tokens_of
from tests.tiny_models import (
    EOS_TOKEN_ID,
    FAMILIES,
    in_mode,
    load_reference,
    of_length,
    random_prompt,
    request,
    tiny_engine,
    write_pair,
)

TEMPERATURE = 0.7
TOP_P = 0.9
SAMPLINGS = [
    {"temperature": TEMPERATURE, "top_p": TOP_P},
    {"temperature": 1.2},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.8},
]
SMALL_VOCABULARY = 7
NUM_SEEDS = 600


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A vocabulary of seven: the joint distribution of two tokens has few cells."""
    return write_pair(tmp_path_factory.mktemp("small"), FAMILIES["llama"], seed=7, vocab_size=SMALL_VOCABULARY)


def requests(seed=0):
    """Different lengths, settings and seeds, side by side."""
    return [
        of_length(length, 24, seed=seed + n, **SAMPLINGS[n % len(SAMPLINGS)])
        for n, length in enumerate((150, 20, 61, 33, 5))
    ]


@pytest.fixture(scope="module")
def autoregressive(pair):
    return tokens_of(tiny_engine(pair, decoding__mode="autoregressive").generate(requests()))


@pytest.mark.parametrize(
    "mode, draft, batch",
    [
        ("autoregressive", "good", 4),
        ("tree", "eagle", 4),
        ("full", "bad", 1),
        ("retrieval", "good", 4),
        ("retrieval", "eagle3", 4),
        ("tree", "ngram", 1),
        ("streaming", "merged-good", 1),
        ("retrieval", "merged-eagle", 4),
    ],
)
def test_a_seed_gives_the_same_text_in_every_mode_and_batch(mode, draft, batch, pair, autoregressive):
    """The noise knows the request's seed and the position, neither the tree nor the neighbours."""
    engine = tiny_engine(pair, draft, decoding__max_batch_size=batch, **in_mode(mode))
    assert tokens_of(engine.generate(requests())) == autoregressive


def test_sampled_drafts_are_accepted_too_and_another_seed_gives_another_text(pair, autoregressive):
    """The equality covers paths of several nodes, packing and positions inside a path; and is not that of greedy."""
    engine = tiny_engine(pair, "good", cache__policy="full")
    assert sum(completion.stats.num_accepted_tokens for completion in engine.generate(requests())) > 20
    others = engine.generate(requests(seed=100))
    assert all(each.token_ids != autoregressive[each.request_id] for each in others)


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
    requests = [request(str(seed), prompt, 2, seed=seed, **SAMPLINGS[0]) for seed in range(NUM_SEEDS)]
    counts = Counter(tuple(completion.token_ids) for completion in engine.generate(requests))
    assert set(counts) <= set(joint), "nothing that top-p leaves out"
    assert chi_square_p(counts, joint) > 0.001


@torch.no_grad()
def test_the_chi_square_can_tell(small):
    """The same counts against the distribution of the other order of the two tokens."""
    prompt = random_prompt(60, vocab_size=SMALL_VOCABULARY)
    joint = joint_distribution(load_reference(small), prompt, 2)
    assert 6 <= len(joint) <= SMALL_VOCABULARY**2
    counts = Counter({cell: round(p * NUM_SEEDS) for cell, p in joint.items()})
    assert chi_square_p(counts, joint) > 0.99
    shifted = dict(zip(joint, itertools.islice(itertools.cycle(joint.values()), 1, len(joint) + 1), strict=True))
    assert chi_square_p(counts, shifted) < 1e-6
