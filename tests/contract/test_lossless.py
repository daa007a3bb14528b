"""Output equals transformers' own, token for token, and sampled output that of plain decoding with the same seed: every
family, mode, policy, kernel, batch and draft, for requests with penalties beside those without.
"""

from functools import cache

import pytest
import yaml

from tests.covering import covering, each_once_then_slow
from tests.reference_outputs import tokens_of
from tests.tiny_models import BACKENDS, FAMILIES, PUBLISHED, in_mode, of_length, tiny_engine, write_wide_target

ASKED = yaml.safe_load("""
    300: {}
    37: {repetition_penalty: 1.3, no_repeat_ngram_size: 2}
    25: {repetition_penalty: 0.7}
    60: {temperature: 0.7, top_p: 0.9, seed: 5}
    129: {temperature: 1.0, top_k: 20, top_p: 0.8, repetition_penalty: 1.2, seed: 6}
""")
"""Length of a prompt -> how its output is to be chosen; greedily without a seed."""
MAX_NEW_TOKENS = 40
NGRAMS = ("ngram", "merged-cut", "merged-eagle")
POLICIES = ("full", "streaming", "retrieval")
SMALL_DRAFTS = ("good", "eagle", "copy", "eagle3")


def engine_of(pair, mode, backend, tree, batch, draft, quantize=None):
    """`mode` is a decoding mode or, for specextend, a cache policy."""
    changes = {"attention__backend": backend, "attention__tree": tree, "decoding__max_batch_size": batch}
    return tiny_engine(pair, draft, target__quantize=quantize, **changes, **in_mode(mode))


def plain_engine(pair, **changes):
    return tiny_engine(pair, "ngram", decoding__mode="autoregressive", decoding__max_batch_size=1, **changes)


def completions_of(engine, lengths=ASKED, max_new_tokens=MAX_NEW_TOKENS):
    """What requests of these lengths give, side by side."""
    return list(engine.generate([of_length(length, max_new_tokens, **ASKED.get(length, {})) for length in lengths]))


@pytest.fixture(scope="module")
def own(pairs, references):
    """Family -> what each request gives by transformers or, if it is sampled, by plain decoding.

    On these models no tie is known: look at one before you allow it.
    """

    def found(family):
        greedy = {
            str(length): references(family, length, MAX_NEW_TOKENS, **how).token_ids
            for length, how in ASKED.items()
            if "seed" not in how
        }
        return tokens_of(completions_of(plain_engine(pairs(family)))) | greedy

    return cache(found)


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
def test_output_is_the_targets_own(family, mode, backend, tree, batch, draft, pairs, own):
    """Cache policy, tree attention and backend are three switches: no combination may matter.

    Noise and penalties know a request's seed, the position and the path, neither the tree nor the neighbours.
    """
    assert tokens_of(completions_of(engine_of(pairs(family), mode, backend, tree, batch, draft))) == own(family)


def mean_acceptance_length(stats):
    return 1 + sum(each.num_accepted_tokens for each in stats) / sum(each.num_spec_steps for each in stats)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_matrix_proves_something(family, pairs, own, references):
    """Random models tend to repeat one token, and every decoder agrees on that; options must change what is said, and
    paths be packed and rolled back. At most 48 tokens are visible to the draft.
    """
    greedy = {str(length): references(family, length, MAX_NEW_TOKENS).token_ids for length in ASKED}
    assert len(set().union(*greedy.values())) >= 20
    assert max(map(len, greedy.values())) == MAX_NEW_TOKENS
    assert sum(token_ids == greedy[name] for name, token_ids in own(family).items()) <= 2
    good, bad = (
        [each.stats for each in completions_of(engine_of(pairs(family), mode, "sdpa", "hybrid", 3, draft))]
        for mode, draft in (("full", "good"), ("retrieval", "bad"))
    )
    assert mean_acceptance_length(good) > 1.6
    assert mean_acceptance_length(bad) < 1.4
    assert sum(each.num_retrievals for each in bad) > 10
    assert min(each.retrieval_coverage for each in bad if each.num_retrievals) < 0.9


EIGHT_BITS = covering(
    ["llama", "qwen2-tied", "qwen3"], ("tree", *POLICIES), ["dense", "hybrid"], [3, 1], SMALL_DRAFTS, strength=1
)
FOUR_BITS = covering(["wide"], POLICIES, ["dense"], [3, 1], ["good"], strength=1)


@pytest.mark.parametrize(
    "scheme, family, mode, tree, batch, draft",
    [*(("int8", *case) for case in EIGHT_BITS), *(("int4", *case) for case in FOUR_BITS)],
)
def test_with_rounded_weights_output_is_that_of_plain_decoding_with_them(
    scheme, family, mode, tree, batch, draft, pairs, tmp_path
):
    """A scale is one of the weights, never one of a token's neighbours. In fp32 nothing else is rounded: what the
    matrix's prompts give is what each gives alone and without a draft. Groups of 64 inputs need a wider target.
    """
    pair = write_wide_target(tmp_path) if family == "wide" else pairs(family)
    plain, exact = (tokens_of(completions_of(plain_engine(pair, target__quantize=each))) for each in (scheme, None))
    found = completions_of(engine_of(pair, mode, "auto", tree, batch, draft, scheme))
    assert tokens_of(found) == plain != exact


SEVERAL_CHUNKS = covering(POLICIES, SMALL_DRAFTS, [1100], strength=1)
"""1,100 tokens take three forwards; the draft's window slides over their borders."""
SHORTEST = covering(POLICIES, SMALL_DRAFTS, [1, 2, 3, 8, 9])
"""One token gives a head no key at all, and a chunk is longer than the text."""


@pytest.mark.parametrize("policy, draft, length", [*SEVERAL_CHUNKS, *SHORTEST])
def test_prompts_of_unusual_length(policy, draft, length, pairs, references):
    """Longer than a prefill chunk, or shorter than a chunk of the cache policy."""
    engine = engine_of(pairs("llama"), policy, "sdpa", "hybrid", 1, draft)
    [found] = completions_of(engine, [length], 24)
    assert found.token_ids == references("llama", length, 24).token_ids


CHOICES = [
    "{score_layers: [0]}",
    "{score_layers: [0, 1, -1], refresh_every: 2}",
    "{score_layers: [1], refresh_every: 1}",
    "{chunk_size: 7, top_k_chunks: 7}",
]


@pytest.mark.parametrize("choice, draft, batch", covering(CHOICES, ["good", "eagle", "cut"], [1, 3]))
def test_whatever_retrieval_trusts_output_is_the_targets_own(choice, draft, batch, pairs, own):
    """A selection decides what the draft sees, never what is said."""
    changes = {f"cache__{key}": value for key, value in yaml.safe_load(choice).items()}
    engine = tiny_engine(pairs("llama"), draft, decoding__max_batch_size=batch, **changes)
    completions = completions_of(engine)
    assert tokens_of(completions) == own("llama")
    stats = [completion.stats for completion in completions]
    assert sum(each.num_retrievals for each in stats) > batch
    hidden = min(each.retrieval_coverage for each in stats if each.num_retrievals)
    assert hidden < 0.95, "much of the prompt is hidden, or this would prove little"
