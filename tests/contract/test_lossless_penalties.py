"""With repetition penalties, output equals transformers' own, and sampled output plain sampling, in every mode."""

import pytest

from tests.covering import each_once_then_slow
from tests.reference_outputs import generate, tokens_of
from tests.tiny_models import in_mode, load_reference, random_prompt, request, tiny_engine

MAX_NEW_TOKENS = 40
LENGTHS = {"penalty": 60, "reward": 25, "ngrams": 20, "both": 300, "none": 37}
OPTIONS = {
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.7},
    "ngrams": {"no_repeat_ngram_size": 1},
    "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "none": {},
}
AXES = (("autoregressive", "tree", "streaming", "retrieval"), ("good", "bad", "eagle", "ngram", "merged-good"), (4, 1))


@pytest.fixture(scope="module")
def reference(pair):
    """Name of a request, and options -> its output by transformers."""
    model = load_reference(pair)
    return lambda name, **options: generate(model, random_prompt(LENGTHS[name]), MAX_NEW_TOKENS, **options).token_ids


@pytest.fixture(scope="module")
def own(reference):
    """Each request's output by transformers."""
    return {name: reference(name, **options) for name, options in OPTIONS.items()}


def engine_of(pair, mode, draft, batch):
    return tiny_engine(pair, draft, decoding__max_batch_size=batch, **in_mode(mode))


def outputs(engine, **sampling):
    """All requests side by side, each with penalties of its own; the seeds differ, too."""
    requests = [
        request(name, random_prompt(LENGTHS[name]), MAX_NEW_TOKENS, **OPTIONS[name], **sampling, seed=number)
        for number, name in enumerate(OPTIONS)
    ]
    return list(engine.generate(requests))


@pytest.mark.parametrize("mode, draft, batch", each_once_then_slow(*AXES))
def test_output_with_penalties_is_the_targets_own(mode, draft, batch, pair, own):
    """A node's penalties count the tokens of its path: what a step accepts was penalised as in plain decoding."""
    assert tokens_of(outputs(engine_of(pair, mode, draft, batch))) == own


def test_these_penalties_change_something(reference, own):
    """Else the equality above would be that of a program without penalties."""
    for name in OPTIONS.keys() - {"none"}:
        assert own[name] != reference(name)


SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def sampled(pair):
    """What plain sampling gives."""
    return tokens_of(outputs(tiny_engine(pair, decoding__mode="autoregressive"), **SAMPLED))


@pytest.mark.parametrize("mode, draft, batch", [("tree", "good", 4), ("retrieval", "merged-good", 1)])
def test_a_seed_gives_the_same_text_with_penalties_in_every_mode(mode, draft, batch, pair, sampled):
    """The noise is added to the penalised logits, wherever in a tree they were computed."""
    found = outputs(engine_of(pair, mode, draft, batch), **SAMPLED)
    assert tokens_of(found) == sampled
    assert sum(each.stats.num_accepted_tokens for each in found) > 20
