"""Models with recurrent layers: chains of drafts, batches, prompts in chunks and in common, choices."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from transformers import AutoConfig, Lfm2Config

from specextend.core import Choice
from specextend.data.answers import schema_of
from specextend.decoding.recurrent import MOST_PENDING
from specextend.models.causal_lm import read_facts
from specextend.models.loading import memory_bytes
from specextend.models.model_files import ModelError
from specextend.models.pairing import check_pair
from tests import reference_outputs
from tests.prophet import Prophet
from tests.reference_outputs import score_choices, tokens_of
from tests.tiny_models import (
    EOS_TOKEN_ID,
    Family,
    Pair,
    engine_with,
    load_reference,
    of_length,
    random_prompt,
    request,
    spelling_tokenizer,
    tiny_config,
    tiny_engine,
    tiny_model,
    write_family,
    write_model,
)

FAMILIES = yaml.safe_load("""
    lfm2: {layer_types: [conv, full_attention, conv, full_attention], num_hidden_layers: 4}
    qwen3_5_text: &delta
      layer_types: [linear_attention, full_attention, linear_attention, full_attention]
      num_hidden_layers: 4
      head_dim: 16
      linear_num_key_heads: 2
      linear_num_value_heads: 4
      linear_key_head_dim: 16
      linear_value_head_dim: 16
    qwen3_next: *delta
    olmo_hybrid: *delta
    granitemoehybrid: {layer_types: [mamba, attention, mamba, attention], num_hidden_layers: 4}
    bamba: {attn_layer_indices: [1], num_hidden_layers: 4}
    nemotron_h: {hybrid_override_pattern: M-M*-ME}
    falcon_h1: {}
    kimi_linear:
      {kv_lora_rank: 32, head_dim: 16, linear_head_dim: 16, v_head_dim: 16, qk_rope_head_dim: 16, qk_nope_head_dim: 16}
    qwen3_5_moe_text: *delta
    lfm2_moe: {layer_types: [conv, full_attention, conv, full_attention], num_hidden_layers: 4}
""")
"""The first two, a short convolution and a gated delta rule, are in every test run."""
DELTA = FAMILIES["qwen3_5_text"]
FAST, OTHERS = [*FAMILIES][:2], [*FAMILIES][2:]
LENGTHS = (1100, 37, 129)
"""Tokens of the prompts of a batch; the longest takes two chunks."""
NEW_TOKENS = 40
ENDS = {"eos_token_id": EOS_TOKEN_ID}
"""Some families have no end of their own."""


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("lfm2"), "lfm2", **FAMILIES["lfm2"])


def plain_engine(pair):
    return tiny_engine(pair, "ngram", decoding__mode="autoregressive")


def requests_of(temperature, **changes):
    asked = [of_length(length, NEW_TOKENS, temperature=temperature, seed=length) for length in LENGTHS]
    return [replace(each, **changes) for each in asked]


def foretold(pair, expected):
    """Return an engine whose draft knows the outputs."""
    outputs = {int(name): token_ids for name, token_ids in expected.items()}
    return engine_with(tiny_config(pair, "ngram", decoding__max_batch_size=3), lambda _: Prophet(outputs))


@pytest.mark.parametrize("family", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_chains_of_drafts_yield_what_the_stock_model_says(family, tmp_path):
    """Greedy by `generate`, sampled by plain decoding; in batches, whatever is accepted and however much."""
    pair = write_family(tmp_path, family, **FAMILIES[family])
    stock = load_reference(pair)
    greedy = {
        str(length): reference_outputs.generate(stock, random_prompt(length), NEW_TOKENS, **ENDS).token_ids
        for length in LENGTHS
    }
    sampled = tokens_of(plain_engine(pair).generate(requests_of(0.7)))
    assert greedy != sampled
    for expected, temperature in ((greedy, 0.0), (sampled, 0.7)):
        completions = [*foretold(pair, expected).generate(requests_of(temperature))]
        assert tokens_of(completions) == expected
        histogram = [sum(each) for each in zip(*(done.stats.acceptance_histogram for done in completions), strict=True)]
        assert all(histogram), "steps that accept each number of drafts"


def test_a_pair_with_a_small_lm_and_n_grams_decodes_a_model_with_recurrent_layers(lfm2, pairs):
    """Retrieval goes by its layers of attention."""
    pair = Pair(lfm2.target, {"good": pairs("llama").drafts["good"]})
    completions = [*tiny_engine(pair, "merged-good", decoding__max_batch_size=3).generate(requests_of(0.0))]
    assert tokens_of(completions) == tokens_of(plain_engine(lfm2).generate(requests_of(0.0)))
    assert sum(done.stats.num_retrievals for done in completions) > 3


def test_prompts_that_begin_alike_share_the_state_after_a_chunk(lfm2):
    """A task on the same document: the state is kept where a chunk of the prompt ended."""
    first, second = (
        request(str(seed), [*random_prompt(1100), *random_prompt(20, seed=seed)], NEW_TOKENS) for seed in (1, 2)
    )
    engine = plain_engine(lfm2)
    [expected] = engine.generate([second])
    found = {done.request_id: done for done in engine.generate([first, second])}
    assert found["2"].stats.num_cached_tokens == 1024
    assert found["2"].token_ids == expected.token_ids


def test_values_of_a_choice_are_scored_one_by_one(lfm2):
    """Each behind the prompt and the choices before; none sees what another left in a state."""
    prompt = random_prompt(60)
    texts = {"one": ("t5 t6", "t5 t9 t11", "t7"), "next": (" t4 t8", " t9")}
    choices = tuple(Choice(field, values, values) for field, values in texts.items())
    engine = plain_engine(lfm2)
    [done] = engine.generate([replace(request("choices", prompt, NEW_TOKENS), choices=choices)])
    text, expected = score_choices(load_reference(lfm2), engine.tokenizer, prompt, choices)
    scored = torch.tensor([each.log_prob for each in done.scored]).double()
    torch.testing.assert_close(scored, expected, atol=1e-4, rtol=0)
    assert done.text == text


def test_what_a_schema_forces_beside_a_draft_leaves_a_chain(tmp_path):
    """The grammar's token beside a wrong draft would be a branch, which no recurrent layer can read."""
    family = Family(config=partial(Lfm2Config, layer_types=["conv", "full_attention", "conv"]))
    model = tiny_model(family, 3, vocab_size=320)
    pair = Pair(write_model(model, tmp_path / "target", spelling_tokenizer), {})
    schema = schema_of({"kind": "audit | budget", "agency": {"type": "string", "maxLength": 30}, "closed": "boolean"})
    asked = requests_of(0.0, schema=schema, max_new_tokens=90)
    expected = tokens_of(plain_engine(pair).generate(asked))

    completions = [*foretold(pair, expected).generate(asked)]
    assert tokens_of(completions) == expected
    assert sum(done.stats.num_accepted_tokens for done in completions) > 10


def test_states_are_part_of_the_forecast_of_memory(lfm2):
    """Those of each running sequence, before and after a step."""
    facts = read_facts(lfm2.target)
    config = AutoConfig.from_pretrained(lfm2.target)
    assert facts.state_bytes == 2 * 4 * config.hidden_size * config.conv_L_cache
    configs = [tiny_config(lfm2, "ngram", decoding__max_batch_size=size) for size in (1, 3)]
    one, three = (memory_bytes(config, facts)["target_cache"] for config in configs)
    assert three - one >= 4 * facts.state_bytes


def test_a_draft_with_recurrent_layers_is_refused(lfm2):
    """It would have to draft trees, which have no one past."""
    config = tiny_config(lfm2, "good")
    with pytest.raises(ModelError, match="recurrent state, which drafts no trees; take one without"):
        check_pair(config.target, config.draft)


def test_more_tokens_than_are_kept_pending_are_decided_in_one_test():
    """Otherwise no state would be kept in the middle of an output."""
    assert NEW_TOKENS > 2 * MOST_PENDING
