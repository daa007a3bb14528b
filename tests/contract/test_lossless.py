"""Greedy output equals transformers' own, token for token: every family, mode, policy, kernel, batch and draft."""

import pytest

from tests.covering import covering, each_once_then_slow
from tests.reference_outputs import tokens_of
from tests.tiny_models import BACKENDS, FAMILIES, PUBLISHED, in_mode, of_length, tiny_engine, write_wide_target

PROMPT_LENGTHS = (300, 37, 129)
MAX_NEW_TOKENS = 40
NGRAMS = ("ngram", "merged-cut", "merged-eagle")
POLICIES = ("full", "streaming", "retrieval")
SMALL_DRAFTS = ("good", "eagle", "copy", "eagle3")


def engine_of(pair, mode, backend, tree, batch, draft, quantize=None):
    """`mode` is a decoding mode or, for specextend, a cache policy."""
    changes = {"attention__backend": backend, "attention__tree": tree, "decoding__max_batch_size": batch}
    return tiny_engine(pair, draft, target__quantize=quantize, **changes, **in_mode(mode))


def completions_of(engine, lengths=PROMPT_LENGTHS, max_new_tokens=MAX_NEW_TOKENS):
    return list(engine.generate([of_length(length, max_new_tokens) for length in lengths]))


def own(references, family, lengths, max_new_tokens=MAX_NEW_TOKENS):
    """What transformers gives. On these models no tie is known: look at one before you allow it."""
    return {str(length): references(family, length, max_new_tokens).token_ids for length in lengths}


@pytest.mark.parametrize(
    "family, mode, backend, tree, batch, draft",
    each_once_then_slow(
        tuple(FAMILIES),
        ("autoregressive", "tree", *POLICIES),
        BACKENDS,
        ("dense", "hybrid"),
        (1, 3),
        ("good", "bad", "eagle", "reduced", "copy", "cut", *PUBLISHED, *NGRAMS),
    ),
)
def test_output_is_the_targets_own(family, mode, backend, tree, batch, draft, pairs, references):
    """Cache policy, tree attention and backend are three switches: no combination may matter."""
    lengths = PROMPT_LENGTHS[:batch]
    completions = completions_of(engine_of(pairs(family), mode, backend, tree, batch, draft), lengths)
    assert tokens_of(completions) == own(references, family, lengths)


@pytest.mark.parametrize("family", FAMILIES)
def test_these_models_have_something_to_say(family, references):
    """Random models tend to repeat one token, and every decoder agrees on that."""
    outputs = [references(family, length, MAX_NEW_TOKENS).token_ids for length in PROMPT_LENGTHS]
    assert len(set().union(*outputs)) >= 20
    assert max(map(len, outputs)) == MAX_NEW_TOKENS


def mean_acceptance_length(completions):
    stats = [completion.stats for completion in completions]
    return 1 + sum(each.num_accepted_tokens for each in stats) / sum(each.num_spec_steps for each in stats)


@pytest.mark.parametrize("family", FAMILIES)
def test_good_drafts_are_accepted_bad_ones_are_not_and_retrieval_hides_much_of_the_prompt(family, pairs):
    """Paths are packed and rolled back, and at most 48 tokens are visible: else the matrix above would prove little."""
    found = completions_of(engine_of(pairs(family), "full", "sdpa", "hybrid", 3, "good"))
    assert mean_acceptance_length(found) > 1.6
    completions = completions_of(engine_of(pairs(family), "retrieval", "sdpa", "hybrid", 3, "bad"))
    assert mean_acceptance_length(completions) < 1.4
    stats = [completion.stats for completion in completions]
    assert sum(each.num_retrievals for each in stats) > 10
    assert min(each.retrieval_coverage for each in stats if each.num_retrievals) < 0.9


def assert_plain_decoding_with(scheme, pair, *how):
    """In fp32 nothing else is rounded: what the matrix's prompts give is what each gives alone and without a draft."""

    def plain(quantize):
        changes = {"decoding__mode": "autoregressive", "decoding__max_batch_size": 1, "target__quantize": quantize}
        return tokens_of(completions_of(tiny_engine(pair, "ngram", **changes)))

    expected = plain(scheme)
    assert tokens_of(completions_of(engine_of(pair, *how, quantize=scheme))) == expected
    assert plain(None) != expected


@pytest.mark.parametrize(
    "family, mode, tree, batch, draft",
    covering(
        ("llama", "qwen2-tied", "qwen3"), ("tree", *POLICIES), ("dense", "hybrid"), (3, 1), SMALL_DRAFTS, strength=1
    ),
)
def test_with_weights_in_8_bits_output_is_that_of_plain_decoding_with_them(family, mode, tree, batch, draft, pairs):
    """A scale is one of the weights, never one of a token's neighbours."""
    assert_plain_decoding_with("int8", pairs(family), mode, "auto", tree, batch, draft)


@pytest.mark.parametrize("policy, batch", covering(POLICIES, (3, 1), strength=1))
def test_with_weights_in_4_bits_it_is_that_too(policy, batch, tmp_path):
    """The same of other kernels, whose groups of 64 inputs need a wider target."""
    assert_plain_decoding_with("int4", write_wide_target(tmp_path), policy, "auto", "dense", batch, "good")


SEVERAL_CHUNKS = covering(POLICIES, SMALL_DRAFTS, [1100], strength=1)
"""1,100 tokens take three forwards; the draft's window slides over their borders."""
SHORTEST = covering(POLICIES, SMALL_DRAFTS, [1, 2, 3, 8, 9])
"""One token gives a head no key at all, and a chunk is longer than the text."""


@pytest.mark.parametrize("policy, draft, length", [*SEVERAL_CHUNKS, *SHORTEST])
def test_prompts_of_unusual_length(policy, draft, length, pairs, references):
    """Longer than a prefill chunk, or shorter than a chunk of the cache policy."""
    engine = engine_of(pairs("llama"), policy, "sdpa", "hybrid", 1, draft)
    assert tokens_of(completions_of(engine, [length], 24)) == own(references, "llama", [length], 24)


CHOICES = [
    {"score_layers": [0]},
    {"score_layers": [0, 1, -1], "refresh_every": 2},
    {"score_layers": [1], "refresh_every": 1},
    {"chunk_size": 7, "top_k_chunks": 7},
]


@pytest.mark.parametrize("choice, draft, batch", covering(CHOICES, ["good", "eagle"], [1, 3]))
def test_whatever_retrieval_trusts_output_is_the_targets_own(choice, draft, batch, pairs, references):
    """A selection decides what the draft sees, never what is said."""
    changes = {f"cache__{key}": value for key, value in choice.items()}
    engine = tiny_engine(pairs("llama"), draft, decoding__max_batch_size=batch, **changes)
    lengths = PROMPT_LENGTHS[:batch]
    completions = completions_of(engine, lengths)
    assert tokens_of(completions) == own(references, "llama", lengths)
    stats = [completion.stats for completion in completions]
    assert sum(each.num_retrievals for each in stats) > batch
    hidden = min(each.retrieval_coverage for each in stats if each.num_retrievals)
    assert hidden < 0.95, "much of the prompt is hidden, or this would prove little"
