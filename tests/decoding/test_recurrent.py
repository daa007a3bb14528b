"""Models with recurrent layers: chains of drafts, batches, prompts in chunks and in common, choices."""

from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specextend.core import Choice
from specextend.data.answers import schema_of
from specextend.decoding.recurrent import MOST_PENDING
from specextend.decoding.tree import Drafter, DraftTrees, TreeNode
from specextend.models.causal_lm import read_facts
from specextend.models.loading import memory_bytes
from specextend.models.model_files import ModelError
from specextend.models.pairing import check_pair
from tests import reference_outputs
from tests.reference_outputs import tokens_of
from tests.tiny_models import (
    EOS_TOKEN_ID,
    VOCABULARY,
    Pair,
    engine_with,
    load_reference,
    random_prompt,
    request,
    spelling_tokenizer,
    tiny_config,
    tiny_engine,
    write_family,
    write_model,
)

MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4, "head_dim": 16}
DELTA = {
    **MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "qwen3_5_text": DELTA,
}
"""A short convolution and a gated delta rule."""
OTHERS = {
    "qwen3_next": DELTA,
    "olmo_hybrid": DELTA,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 4},
}
LENGTHS = (1100, 37, 129)
"""Tokens of the prompts of a batch; the longest takes two chunks."""
NEW_TOKENS = 40
ENDS = {"eos_token_id": EOS_TOKEN_ID}
"""Some families have no end of their own."""


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("lfm2"), "lfm2", **FAMILIES["lfm2"])


class Prophet(Drafter):
    """Drafts what the target will say, now and then something else, with siblings that no chain has."""

    num_levels = 4

    def __init__(self, outputs):
        self._outputs = outputs
        self._random = Random(0)
        self._said = {}

    def admit(self, slot, num_prompt_tokens, max_new_tokens):
        self._said[slot] = self._outputs[num_prompt_tokens], 0
        return True

    def read(self, slot, token_ids):
        output, count = self._said[slot]
        self._said[slot] = output, count + len(token_ids)

    def propose(self, slots, num_drafts=None):
        return DraftTrees.pad([self._tree(slot) for slot in slots], torch.device("cpu"))

    def _tree(self, slot):
        output, count = self._said[slot]
        nodes = [TreeNode(-1, output[count - 1], 0, 0.0)]
        parent = 0
        for depth, token_id in enumerate(output[count : count + self._random.randint(0, 4)], 1):
            wrong = (token_id + 1) % VOCABULARY
            if self._random.random() < 0.2:
                token_id, wrong = wrong, token_id
            nodes += [TreeNode(parent, token_id, depth, -0.1 * depth), TreeNode(parent, wrong, depth, -5.0 * depth)]
            parent = len(nodes) - 2
        return nodes


def requests_of(temperature):
    return [
        request(str(length), random_prompt(length), NEW_TOKENS, temperature=temperature, seed=length)
        for length in LENGTHS
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_chains_of_drafts_yield_what_the_stock_model_says(family, tmp_path):
    """Greedy by `generate`, sampled by plain decoding; in batches, whatever is accepted and however much."""
    pair = write_family(tmp_path, family, **(FAMILIES | OTHERS)[family])
    plain = tiny_engine(pair, decoding__mode="autoregressive")
    stock = load_reference(pair)
    greedy = {
        str(length): reference_outputs.generate(stock, random_prompt(length), NEW_TOKENS, **ENDS).token_ids
        for length in LENGTHS
    }
    sampled = tokens_of(plain.generate(requests_of(0.7)))
    assert greedy != sampled
    assert tokens_of(plain.generate(requests_of(0.0))) == greedy
    for expected, temperature in ((greedy, 0.0), (sampled, 0.7)):
        outputs = {int(name): token_ids for name, token_ids in expected.items()}
        config = tiny_config(pair, "ngram", decoding__max_batch_size=3)
        engine = engine_with(config, lambda _, outputs=outputs: Prophet(outputs))
        completions = [*engine.generate(requests_of(temperature))]
        assert tokens_of(completions) == expected
        histogram = [sum(each) for each in zip(*(done.stats.acceptance_histogram for done in completions), strict=True)]
        assert all(histogram), "steps that accept each number of drafts"


def test_a_pair_with_a_small_lm_and_n_grams_decodes_a_model_with_recurrent_layers(lfm2, pairs):
    """Retrieval goes by its layers of attention."""
    pair = Pair(lfm2.target, {"good": pairs("llama").drafts["good"]})
    expected = tokens_of(tiny_engine(lfm2, decoding__mode="autoregressive").generate(requests_of(0.0)))
    engine = tiny_engine(pair, "merged-good", decoding__max_batch_size=3)
    completions = [*engine.generate(requests_of(0.0))]
    assert tokens_of(completions) == expected
    assert sum(done.stats.num_retrievals for done in completions) > 3


def test_prompts_that_begin_alike_share_the_state_after_a_chunk(lfm2):
    """A task on the same document: the state is kept where a chunk of the prompt ended."""
    first, second = ([*random_prompt(1100), *random_prompt(20, seed=seed)] for seed in (1, 2))
    apart = tiny_engine(lfm2, decoding__mode="autoregressive")
    [expected] = apart.generate([request("second", second, NEW_TOKENS)])
    together = [request("first", first, NEW_TOKENS), request("second", second, NEW_TOKENS)]
    found = {done.request_id: done for done in apart.generate(together)}
    assert found["second"].stats.num_cached_tokens == 1024
    assert found["second"].token_ids == expected.token_ids


def test_values_of_a_choice_are_scored_one_by_one(lfm2):
    """Each behind the prompt and the choices before; none sees what another left in a state."""
    prompt = random_prompt(60)
    texts = {"one": ("t5 t6", "t5 t9 t11", "t7"), "next": (" t4 t8", " t9")}
    choices = tuple(Choice(field, values, values) for field, values in texts.items())
    engine = tiny_engine(lfm2, decoding__mode="autoregressive")
    [done] = engine.generate([replace(request("choices", prompt, NEW_TOKENS), choices=choices)])
    stock = load_reference(lfm2)
    before = ""
    for field, values in texts.items():
        paths = engine.tokenizer([before + each for each in values], add_special_tokens=False)["input_ids"]
        sums = torch.tensor([log_prob_of(stock, prompt, path) for path in paths])
        scored = [each.log_prob for each in done.scored if each.field == field]
        torch.testing.assert_close(torch.tensor(scored), sums.log_softmax(0), atol=1e-4, rtol=0)
        before += values[int(sums.argmax())]


@torch.inference_mode()
def log_prob_of(stock, prompt, path):
    """The sum of a path's log probabilities behind a prompt, by the stock model."""
    logits = stock(input_ids=torch.tensor([prompt + path]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(path)[:, None]).sum())


class Speller(Prophet):
    """Drafts what the target will say letter by letter, where a schema forces longer tokens."""

    def __init__(self, outputs, tokenizer):
        super().__init__(outputs)
        self._tokenizer = tokenizer

    def _tree(self, slot):
        output, count = self._said[slot]
        letters = "".join(self._tokenizer.convert_ids_to_tokens(output[count:]))[:4]
        token_ids = [output[count - 1], *self._tokenizer.convert_tokens_to_ids([*letters])]
        return [TreeNode(depth - 1, token_id, depth, -0.1 * depth) for depth, token_id in enumerate(token_ids)]


def test_what_a_schema_forces_beside_a_draft_leaves_a_chain(tmp_path):
    """The grammar's token for the same letters would be a branch, which no recurrent layer can read."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    ends = {"eos_token_id": EOS_TOKEN_ID, "bos_token_id": EOS_TOKEN_ID, "pad_token_id": 0}
    config = AutoConfig.for_model("lfm2", **FAMILIES["lfm2"], **sizes, **ends, num_key_value_heads=2)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        weight.data *= 4.0 if weight.dim() > 1 else 1.0
    pair = Pair(write_model(model, tmp_path / "target", spelling_tokenizer), {})
    schema = schema_of({"kind": "audit | budget", "agency": {"type": "string", "maxLength": 30}, "closed": "boolean"})
    asked = [replace(each, schema=schema, max_new_tokens=90) for each in requests_of(0.0)]
    plain = tiny_engine(pair, "ngram", decoding__mode="autoregressive")
    expected = tokens_of(plain.generate(asked))
    outputs = {int(name): token_ids for name, token_ids in expected.items()}
    engine = engine_with(
        tiny_config(pair, "ngram", decoding__max_batch_size=3), lambda _: Speller(outputs, plain.tokenizer)
    )
    completions = [*engine.generate(asked)]
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
