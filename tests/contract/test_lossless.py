"""Greedy output equals transformers' own, token for token: every family, mode, policy, kernel, batch and draft."""

import pytest

from tests.covering import covering
from tests.tiny_models import (
    BACKENDS,
    FAMILIES,
    PUBLISHED,
    of_length,
    random_prompt,
    request,
    tiny_engine,
    write_wide_target,
)

PROMPT_LENGTHS = (300, 37, 129)
MAX_NEW_TOKENS = 40
NGRAMS = ("ngram", "merged-cut", "merged-eagle")
POLICIES = ("full", "streaming", "retrieval")
SMALL_DRAFTS = ("good", "eagle", "copy", "eagle3")
AXES = {
    "family": tuple(FAMILIES),
    "mode": ("autoregressive", "tree", *POLICIES),
    "backend": BACKENDS,
    "tree": ("dense", "hybrid"),
    "batch": (1, 3),
    "draft": ("good", "bad", "eagle", "reduced", "copy", "cut", *PUBLISHED, *NGRAMS),
}
FAST = covering(*AXES.values(), strength=1)
SLOW = [case for case in covering(*AXES.values()) if case not in FAST]
"""Any two choices meet in a case of these or of the fast ones."""


def engine_of(pair, mode, backend, tree, batch, draft, quantize=None):
    """`mode` is a decoding mode or, for specextend, a cache policy."""
    changes = {"attention__backend": backend, "attention__tree": tree, "decoding__max_batch_size": batch}
    changes |= {"target__quantize": quantize}
    if mode in ("autoregressive", "tree"):
        return tiny_engine(pair, draft, decoding__mode=mode, **changes)
    return tiny_engine(pair, draft, cache__policy=mode, **changes)


def engine_batch(case):
    return case[tuple(AXES).index("batch")]


def name_of(case):
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=name_of)
def test_output_is_the_targets_own(case, pairs, references, ties):
    """Cache policy, tree attention and backend are three switches: no combination may matter."""
    family, *how = case
    engine = engine_of(pairs(family), *how)
    lengths = PROMPT_LENGTHS[: engine_batch(case)]
    requests = [of_length(length, MAX_NEW_TOKENS) for length in lengths]
    completions = list(engine.generate(requests))
    assert {completion.request_id for completion in completions} == {str(length) for length in lengths}
    for completion in completions:
        reference = references(family, int(completion.request_id), MAX_NEW_TOKENS)
        ties.assert_equal(completion.token_ids, reference, f"{name_of(case)}, {completion.request_id}")
    assert not ties.found, "no tie is known on these models; look at it before you allow it"


@pytest.mark.parametrize("family", FAMILIES)
def test_these_models_have_something_to_say(family, references):
    """Random models tend to repeat one token, and every decoder agrees on that."""
    outputs = [references(family, length, MAX_NEW_TOKENS).token_ids for length in PROMPT_LENGTHS]
    assert len(set().union(*outputs)) >= 20
    assert max(map(len, outputs)) == MAX_NEW_TOKENS


def completions_of(pair, policy, draft):
    """What the matrix's prompts give in one batch."""
    engine = engine_of(pair, policy, "sdpa", "hybrid", 3, draft)
    return list(engine.generate([of_length(n, MAX_NEW_TOKENS) for n in PROMPT_LENGTHS]))


def mean_acceptance_length(completions):
    stats = [completion.stats for completion in completions]
    return 1 + sum(each.num_accepted_tokens for each in stats) / sum(each.num_spec_steps for each in stats)


@pytest.mark.parametrize("family", FAMILIES)
def test_good_drafts_are_accepted_bad_ones_are_not_and_retrieval_hides_much_of_the_prompt(family, pairs):
    """Paths are packed and rolled back, and at most 48 tokens are visible: else the matrix above would prove little."""
    assert mean_acceptance_length(completions_of(pairs(family), "full", "good")) > 1.6
    completions = completions_of(pairs(family), "retrieval", "bad")
    assert mean_acceptance_length(completions) < 1.4
    stats = [completion.stats for completion in completions]
    assert sum(each.num_retrievals for each in stats) > 10
    assert min(each.retrieval_coverage for each in stats if each.num_retrievals) < 0.9


QUANTIZED = covering(
    ("llama", "qwen2-tied", "qwen3"),
    ("tree", *POLICIES),
    ("auto",),
    ("dense", "hybrid"),
    (3, 1),
    SMALL_DRAFTS,
    strength=1,
)


def tokens_of(engine):
    """What the matrix's prompts give."""
    requests = [of_length(length, MAX_NEW_TOKENS) for length in PROMPT_LENGTHS]
    return {each.request_id: list(each.token_ids) for each in engine.generate(requests)}


def plain_tokens(pair, quantize):
    """What they give one at a time and without a draft."""
    changes = {"decoding__mode": "autoregressive", "decoding__max_batch_size": 1, "target__quantize": quantize}
    return tokens_of(tiny_engine(pair, "ngram", **changes))


@pytest.mark.parametrize("how", QUANTIZED, ids=name_of)
def test_with_weights_in_8_bits_output_is_that_of_plain_decoding_with_them(how, pairs):
    """A scale is one of the weights, never one of a token's neighbours: in fp32 nothing else is rounded."""
    family, *others = how
    expected = plain_tokens(pairs(family), "int8")
    assert tokens_of(engine_of(pairs(family), *others, quantize="int8")) == expected
    assert plain_tokens(pairs(family), None) != expected


@pytest.mark.parametrize("policy, batch", covering(POLICIES, (3, 1), strength=1))
def test_with_weights_in_4_bits_it_is_that_too(policy, batch, tmp_path):
    """The same of other kernels, whose groups of 64 inputs need a wider target."""
    pair = write_wide_target(tmp_path)
    expected = plain_tokens(pair, "int4")
    assert tokens_of(engine_of(pair, policy, "auto", "dense", batch, "good", quantize="int4")) == expected
    assert plain_tokens(pair, None) != expected


SEVERAL_CHUNKS = covering(POLICIES, SMALL_DRAFTS, [1100], strength=1)
"""1,100 tokens take three forwards; the draft's window slides over their borders."""
SHORTEST = covering(POLICIES, SMALL_DRAFTS, [1, 2, 3, 8, 9])
"""One token gives a head no key at all, and a chunk is longer than the text."""


@pytest.mark.parametrize("policy, draft, length", [*SEVERAL_CHUNKS, *SHORTEST])
def test_prompts_of_unusual_length(policy, draft, length, pairs, references, ties):
    """Longer than a prefill chunk, or shorter than a chunk of the cache policy."""
    engine = engine_of(pairs("llama"), policy, "sdpa", "hybrid", 1, draft)
    [completion] = engine.generate([request("a", random_prompt(length), 24)])
    ties.assert_equal(completion.token_ids, references("llama", length, 24), f"{length}-{policy}-{draft}")
    assert not ties.found


CHOICES = [
    {"score_layers": [0]},
    {"score_layers": [0, 1, -1], "refresh_every": 2},
    {"score_layers": [1], "refresh_every": 1},
    {"chunk_size": 7, "top_k_chunks": 7},
]


@pytest.mark.parametrize("choice, draft, batch", covering(CHOICES, ["good", "eagle"], [1, 3]))
def test_whatever_retrieval_trusts_output_is_the_targets_own(choice, draft, batch, pairs, references, ties):
    """A selection decides what the draft sees, never what is said."""
    changes = {f"cache__{key}": value for key, value in choice.items()}
    engine = tiny_engine(pairs("llama"), draft, decoding__max_batch_size=batch, **changes)
    prompts = [of_length(n, MAX_NEW_TOKENS) for n in PROMPT_LENGTHS[:batch]]
    completions = list(engine.generate(prompts))
    for completion in completions:
        reference = references("llama", int(completion.request_id), MAX_NEW_TOKENS)
        ties.assert_equal(completion.token_ids, reference, f"{choice}, {draft}")
    assert not ties.found
    stats = [completion.stats for completion in completions]
    assert sum(each.num_retrievals for each in stats) > batch
    hidden = min(each.retrieval_coverage for each in stats if each.num_retrievals)
    assert hidden < 0.95, "much of the prompt is hidden, or this would prove little"
