"""Under a schema, output equals transformers' own with the library's masks, and sampled output plain sampling."""

import json
from dataclasses import replace

import jsonschema
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

from specextend.data.answers import answer_fields, schema_of
from specextend.decoding.device import Graphs
from specextend.decoding.speculation import Adaptive
from specextend.models.causal_lm import load_tokenizer
from tests.covering import each_once_then_slow
from tests.recorded_graph import captured_engine, record
from tests.reference_outputs import generate
from tests.test_adaptive import NUM_NODES, ScriptedCosts, adaptive_engine
from tests.tiny_models import (
    EOS_TOKEN_ID,
    in_mode,
    load_reference,
    random_prompt,
    request,
    tiny_engine,
)

MAX_NEW_TOKENS = 150
FIELDS = """
    kind: audit | budget
    agency: {type: string, maxLength: 12}
    amount: number?
    pages: {type: array, items: {type: integer, minimum: 0, maximum: 999}, maxItems: 3}
    closed: boolean
"""
SCHEMA = schema_of(yaml.safe_load(FIELDS))
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENGTHS = {"plain": 60, "penalty": 25, "ngrams": 120, "sampled": 40}
OPTIONS = yaml.safe_load("""
    plain: {}
    penalty: {repetition_penalty: 1.3}
    ngrams: {repetition_penalty: 1.1, no_repeat_ngram_size: 6}
    sampled: {temperature: 0.8, top_k: 30, top_p: 0.95, seed: 5}  # also where fewer tokens are allowed
""")
AXES = (
    ("autoregressive", "tree", "streaming", "retrieval"),
    ("good", "bad", "eagle", "eagle3", "ngram", "merged-good"),
    (4, 1),
)


class Masks(LogitsProcessor):
    """What the library allows behind a prompt of some length; it is asked anew for each token."""

    def __init__(self, tokenizer, vocab_size, num_prompt_tokens):
        grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides=LAYOUT)
        self.begin = LLMatcher(from_tokenizer(tokenizer, vocab_size, [EOS_TOKEN_ID]), grammar)
        self.num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids, scores):
        matcher = self.begin.deep_copy()
        assert matcher.consume_tokens(input_ids[0, self.num_prompt_tokens :].tolist())
        bias = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        return scores.masked_fill(bias[: scores.shape[1]] == 0, float("-inf"))


@pytest.fixture(scope="module")
def own(spelling_pair):
    """Each request's output by transformers; of one that is sampled by plain decoding."""
    model = load_reference(spelling_pair)
    tokenizer = load_tokenizer(spelling_pair.target)
    found = of_schema(outputs(engine_of(spelling_pair, "autoregressive", "bad", 1)))
    for name, options in OPTIONS.items():
        if "seed" not in options:
            masks = LogitsProcessorList([Masks(tokenizer, model.config.vocab_size, LENGTHS[name])])
            prompt = random_prompt(LENGTHS[name])
            found[name] = generate(model, prompt, MAX_NEW_TOKENS, logits_processor=masks, **options).token_ids
    return found


def engine_of(pair, mode, draft, batch):
    return tiny_engine(pair, draft, decoding__max_batch_size=batch, **in_mode(mode))


def requests():
    """All side by side, each with options of its own, and one without a schema."""
    constrained = [
        replace(request(name, random_prompt(LENGTHS[name]), MAX_NEW_TOKENS, **OPTIONS[name]), schema=SCHEMA)
        for name in OPTIONS
    ]
    return [*constrained, request("free", random_prompt(37), MAX_NEW_TOKENS)]


def outputs(engine):
    return {completion.request_id: completion for completion in engine.generate(requests())}


def of_schema(found):
    """The tokens of requests with a schema."""
    return {name: found[name].token_ids for name in OPTIONS}


@pytest.mark.parametrize("mode, draft, batch", each_once_then_slow(*AXES))
def test_output_under_a_schema_is_the_targets_own(mode, draft, batch, spelling_pair, own):
    found = outputs(engine_of(spelling_pair, mode, draft, batch))
    assert of_schema(found) == own
    for name in OPTIONS:
        if found[name].finish_reason == "stop":
            jsonschema.validate(json.loads(found[name].text), json.loads(SCHEMA))


def test_steps_are_the_same_in_fixed_shapes(spelling_pair, own):
    """As a GPU replays them: the masks are applied outside of what is recorded."""
    engine = captured_engine(spelling_pair, "good", Graphs(record), cache__policy="full", decoding__max_batch_size=3)
    assert of_schema(outputs(engine)) == own


def test_what_is_forced_takes_few_steps(spelling_pair):
    """Braces and names are drafted by the grammar, also where the draft knows nothing of them."""
    found = outputs(engine_of(spelling_pair, "full", "bad", 1))
    stats = [found[name].stats for name in OPTIONS]
    assert sum(each.num_accepted_tokens for each in stats) > 60


@pytest.fixture(scope="module")
def small_engine(spelling_pair):
    return tiny_engine(spelling_pair, "good", cache__policy="full")


SCALARS = st.sampled_from(["number?", "integer", "boolean", "a | bc | d e", {"type": "string", "maxLength": 9}])
ANY_FIELD = SCALARS | SCALARS.map(lambda kind: {"type": "array", "items": one_field(kind), "maxItems": 2})


def one_field(kind):
    return json.loads(schema_of({"a": kind}))["properties"]["a"]


@settings(max_examples=15)
@given(fields=st.dictionaries(st.text('abc_ \u00e9"\\', min_size=1, max_size=6), ANY_FIELD, min_size=1, max_size=4))
def test_whatever_the_schema_answers_parse(small_engine, fields):
    """Nothing but the grammar keeps order in random weights. An answer may only be too long."""
    schema = schema_of(fields)
    [found] = small_engine.generate([replace(request("a", random_prompt(40), 400), schema=schema)])
    assert len(answer_fields(schema)) == len(fields)
    if found.finish_reason == "stop":
        jsonschema.validate(json.loads(found.text), json.loads(schema))
    else:
        assert found.finish_reason == "length"


def test_what_is_forced_is_drafted_while_speculation_pauses(spelling_pair, own):
    """Drafting costs five plain steps, so it is given up soon; braces and names take few steps all the same."""
    costs = ScriptedCosts(lambda rows: 1.0, lambda: 5.0)
    [found] = adaptive_engine(spelling_pair, "bad", Adaptive(costs, NUM_NODES)).generate(requests()[:1])
    assert found.token_ids == own["plain"]
    assert found.stats.num_fallbacks == 1
    assert found.stats.num_accepted_tokens > 12


def test_where_penalties_leave_nothing_they_do_not_count(spelling_pair):
    """No token may occur twice, as quotes have to: the schema wins."""
    schema = schema_of({"kind": "audit | budget", "closed": "boolean", "level": {"enum": ["low", "high"]}})
    asked = replace(request("a", random_prompt(40), 100, no_repeat_ngram_size=1), schema=schema)
    found = [next(engine_of(spelling_pair, mode, "good", 1).generate([asked])) for mode in ("autoregressive", "tree")]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].finish_reason == "stop"
    jsonschema.validate(json.loads(found[0].text), json.loads(schema))
