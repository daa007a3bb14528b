"""Sampled output follows the target's own distribution."""

from collections import Counter
from math import sqrt

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from tests.tiny_models import FAMILIES, load_reference, random_prompt, request, tiny_engine, write_pair

SAMPLING = {"temperature": 0.7, "top_p": 0.9}
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)])
SMALL_VOCABULARY = 7
NUM_SEEDS = 600


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A vocabulary of seven: of each first token there are many samples of the second."""
    return write_pair(tmp_path_factory.mktemp("small"), FAMILIES["llama"], seed=7, vocab_size=SMALL_VOCABULARY)


def assert_follow(found, model, tokens):
    """The tokens that came after these are those of transformers, as often as it says; none that top-p leaves out."""
    prompt = torch.tensor([tokens])
    [probabilities] = WARPERS(prompt, model(prompt).logits[:, -1].double()).softmax(-1).tolist()
    for token_id, p in enumerate(probabilities):
        expected = p * found.total()
        assert abs(found[token_id] - expected) <= 4 * sqrt(expected * (1 - p))


@pytest.mark.parametrize("policy, draft", [("full", "bad"), ("streaming", "eagle"), ("retrieval", "merged-good")])
@torch.no_grad()
def test_samples_follow_the_targets_joint_distribution(policy, draft, small):
    """Whatever the draft proposes: top-k children are no samples, and rejection by p/q would be biased here."""
    prompt = random_prompt(60, vocab_size=SMALL_VOCABULARY)
    model = load_reference(small)
    engine = tiny_engine(small, draft, cache__policy=policy, decoding__max_batch_size=16)
    requests = [request(str(seed), prompt, 2, seed=seed, **SAMPLING) for seed in range(NUM_SEEDS)]
    found = [completion.token_ids for completion in engine.generate(requests)]
    first = Counter(tokens[0] for tokens in found)
    assert_follow(first, model, prompt)
    for token_id in first:
        second = Counter(tokens[1] for tokens in found if tokens[0] == token_id and len(tokens) == 2)
        assert_follow(second, model, [*prompt, token_id])
