"""A family of transformers whose layers call our attention yields the stock model's tokens, by the whole engine."""

import pytest

from scripts.families_page import PUBLISHED
from tests import reference_outputs
from tests.reference_outputs import tokens_of
from tests.tiny_models import load_reference, random_prompt, request, tiny_engine, write_family

SMALL = {"head_dim": 16}
KINDS = {
    "gemma3_text": "windows of two kinds of layers, RoPE by kind, norms of queries and keys",
    "gemma2": "scores and logits with a softcap, windows, scaled embeddings",
    "gpt_oss": "sinks, windows and experts",
    "qwen3_moe": "experts",
}
"""Families, and what each has that Llama's layers lack."""
OTHERS = """
afmoe apertus arcee bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe
flex_olmo gemma gemma3n_text gemma4_text glm glm4 glm4_moe gpt2 gpt_neox granite granitemoe helium hy_v3 jais2 laguna
mimo_v2_flash minimax_m2 mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe
seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""

LENGTHS = (600, 37, 129)
"""Tokens of the prompts of a batch; the longest takes two forwards."""
NEW_TOKENS = 24


def requests_of(temperature):
    return [
        request(str(length), random_prompt(length), NEW_TOKENS, temperature=temperature, seed=length)
        for length in LENGTHS
    ]


@pytest.mark.parametrize(
    "family, values",
    [
        *((name, SMALL) for name in KINDS),
        *(pytest.param(name, PUBLISHED.get(name, {}), marks=pytest.mark.slow) for name in OTHERS.split()),
    ],
)
def test_output_of_any_family_is_the_stock_models_own(family, values, tmp_path):
    """In a prompt's chunks, trees, a batch of three, with retrieval, n-grams, a small LM, and with sampling."""
    pair = write_family(tmp_path, family, **values)
    stock = load_reference(pair)
    expected = {
        str(length): reference_outputs.generate(stock, random_prompt(length), NEW_TOKENS).token_ids
        for length in LENGTHS
    }
    assert len({token for each in expected.values() for token in each}) > 10, (
        "a model that repeats itself proves little"
    )
    plain = tiny_engine(pair, decoding__mode="autoregressive", decoding__cache_gib=0.5)
    sampled = tokens_of(plain.generate(requests_of(0.7)))
    assert sampled != expected
    for draft in ("ngram", "merged-good"):
        engine = tiny_engine(pair, draft, decoding__max_batch_size=3, decoding__cache_gib=0.5)
        completions = list(engine.generate(requests_of(0.0)))
        assert tokens_of(completions) == expected
        assert tokens_of(engine.generate(requests_of(0.7))) == sampled
        stats = [completion.stats for completion in completions]
        if draft == "merged-good" and family in KINDS:  # flat logits, as Cohere's, let few drafts grow
            assert sum(each.num_accepted_tokens for each in stats) > 10
            assert sum(each.num_retrievals for each in stats) > 3
