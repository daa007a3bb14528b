"""How sure the target was: log probabilities of the tokens written, and of values that a written answer might have."""

from dataclasses import replace

import pytest
import torch
import yaml

from specextend.core import json_values
from specextend.data.answers import closed_fields, schema_of
from specextend.models.causal_lm import load_tokenizer
from tests.reference_outputs import log_probs_after, score_values
from tests.tiny_models import load_reference, of_length, random_prompt, request, tiny_engine

FIELDS = """
    kind: audit | audit of audits | budget?
    said: {type: string, pattern: "^[a-z]{2,4}$"}
    level: {enum: [1, 10, 100, 2.5]}
    only: {const: this}
    pages: {type: array, items: {type: integer, maximum: 99}, maxItems: 2}
    closed: boolean
"""
SCHEMA = schema_of(yaml.safe_load(FIELDS))
CLOSED = closed_fields(SCHEMA)


@pytest.fixture(scope="module")
def model(spelling_pair):
    return load_reference(spelling_pair)


@pytest.mark.parametrize("temperature, penalty", [(0.0, 1.0), (0.8, 1.3)])
def test_each_token_has_the_log_probability_of_the_target_itself(spelling_pair, model, temperature, penalty):
    """Whatever changed the choice, with a draft and without; they are kept where they are asked for."""
    engine = tiny_engine(spelling_pair, "good", decoding__max_batch_size=3)
    plain = request("a", random_prompt(90), 40, temperature=temperature, seed=5, repetition_penalty=penalty)
    kept = [replace(plain, request_id=name, keeps_log_probs=True, drafts=name == "b") for name in "bc"]
    without, drafted, alone = sorted(engine.generate([plain, *kept]), key=lambda each: each.request_id)
    assert without.token_ids == drafted.token_ids == alone.token_ids
    assert without.log_probs == ()
    assert drafted.stats.num_accepted_tokens > 0 == alone.stats.num_spec_steps
    [expected] = log_probs_after(model, plain.prompt_token_ids, [drafted.token_ids])
    for completion in (drafted, alone):
        torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafts, length", [(True, 40), (False, 150), (True, 71)])
def test_closed_fields_of_a_written_answer_are_scored_behind_what_it_says(spelling_pair, model, drafts, length):
    """As transformers score them; what runs beside it, and the answer itself, stay the same."""
    engine = tiny_engine(spelling_pair, "good", decoding__max_batch_size=2)
    tokenizer = load_tokenizer(spelling_pair.target)
    beside = request("beside", random_prompt(37), 150)
    asked = replace(of_length(length, 200), request_id="asked", schema=SCHEMA, drafts=drafts)
    scored = replace(asked, request_id="scored", closed=CLOSED, keeps_log_probs=True)
    found = {each.request_id: each for each in engine.generate([beside, asked, scored])}
    [alone] = engine.generate([beside])
    plain, completion = found["asked"], found["scored"]
    assert found["beside"].token_ids == alone.token_ids
    assert plain.text == completion.text
    assert plain.scored == ()
    assert len(completion.log_probs) == len(completion.token_ids)
    assert [each.value for each in completion.scored] == [value for each in CLOSED for value in each.values]
    text = completion.text
    spans = {name: (begin, end) for name, begin, end in json_values(text)}
    expected = []
    for choice in CLOSED:
        begin, end = spans[choice.field]
        texts = [text[:begin] + each + text[end] for each in choice.texts]
        expected.append(score_values(model, tokenizer, asked.prompt_token_ids, texts))
    numbers = torch.tensor([each.log_prob for each in completion.scored]).double()
    torch.testing.assert_close(numbers, torch.cat(expected), atol=1e-3, rtol=1e-3)
