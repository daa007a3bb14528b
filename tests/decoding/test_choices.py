"""Scored answers: the log probabilities are those of plain transformers, whatever runs beside them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml

from specextend.core import Questions, SamplingParams
from specextend.data.answers import choices_of, schema_of
from specextend.models.causal_lm import load_tokenizer
from tests.reference_outputs import log_probs_after, score_choices
from tests.tiny_models import load_reference, of_length, random_prompt, request, tiny_engine

FIELDS = {
    "kind": "audit | audit of audits | budget?",
    "agency": " | ".join(f"an office {number}" for number in range(500)),
    "level": {"enum": [1, 10, 100, 2.5]},
    "only": {"const": "this"},
    "closed": "boolean",
}
CHOICES = choices_of(schema_of(FIELDS))
LENGTHS = (40, 71, 150)
ROOM = 200
"""Tokens of an output."""
WRITTEN = request("written", random_prompt(37), 60)


@pytest.fixture(scope="module")
def model(spelling_pair):
    return load_reference(spelling_pair)


def asked(length, **changes):
    return replace(of_length(length, ROOM), choices=CHOICES, **changes)


def outputs(engine, *requests):
    return {completion.request_id: completion for completion in engine.generate(requests)}


@pytest.mark.parametrize(
    "mode, draft, batch, temperature",
    [("autoregressive", "ngram", 1, 0.0), ("tree", "good", 4, 0.9), ("specextend", "eagle", 2, 0.0)],
)
def test_log_probabilities_are_those_of_transformers(mode, draft, batch, temperature, spelling_pair, model):
    """Of 500 values too, beside a text that is written, and whatever the temperature is."""
    engine = tiny_engine(spelling_pair, draft, decoding__mode=mode, decoding__max_batch_size=batch)
    tokenizer = load_tokenizer(spelling_pair.target)
    sampling = SamplingParams(temperature=temperature)
    found = outputs(engine, WRITTEN, *(asked(length, sampling=sampling) for length in LENGTHS))
    assert found["written"].token_ids == outputs(engine, WRITTEN)["written"].token_ids
    for length in LENGTHS:
        completion = found[str(length)]
        text, expected = score_choices(model, tokenizer, random_prompt(length), CHOICES)
        assert (completion.text, completion.finish_reason) == (text, "stop")
        assert [each.value for each in completion.scored] == [value for each in CHOICES for value in each.values]
        numbers = torch.tensor([each.log_prob for each in completion.scored]).double()
        torch.testing.assert_close(numbers, expected, atol=1e-4, rtol=1e-4)


QUESTIONS = [random_prompt(size, seed=size) for size in (12, 30, 60, 7, 120, 90, 33, ROOM)]
"""The ends of questions, a tree full and more; the last question is too long."""


def questions_of(length):
    """Replace the last ten tokens of a prompt by questions with a common beginning."""
    shared = random_prompt(40, seed=length)
    return Questions(length - 10, [[*shared, *each] for each in QUESTIONS], 7, 9)


def verdicts_of(model, length):
    prompt = random_prompt(length)
    questions = questions_of(length)
    for each in questions.token_ids[:-1]:
        both = log_probs_after(model, [*prompt[: questions.num_read], *each], [[7], [9]])
        yield float(torch.cat(both).softmax(0)[0])


def asks(length, text, token_ids):
    """Return the questions of a request once its output is there."""
    assert token_ids
    return questions_of(length)


@pytest.mark.parametrize("mode, draft, batch", [("autoregressive", "ngram", 1), ("tree", "good", 4)])
def test_verdicts_are_those_of_transformers_and_change_no_token(mode, draft, batch, spelling_pair, model):
    """Of an output that ends with its first token, too, and beside outputs that nobody asks about."""
    engine = tiny_engine(spelling_pair, draft, decoding__mode=mode, decoding__max_batch_size=batch)
    plain = [of_length(length, ROOM) for length in LENGTHS]
    alone = outputs(engine, WRITTEN, *plain)
    [first] = engine.generate([of_length(71, 1)])
    stops = SamplingParams(stop=(first.text,)) if first.text else SamplingParams()
    asking = [replace(each, questions=partial(asks, len(each.prompt_token_ids))) for each in plain]
    found = outputs(engine, WRITTEN, *asking, replace(asking[1], request_id="stopped", sampling=stops))
    assert found["written"].verdicts == ()
    assert {name: found[name].token_ids for name in alone} == {name: alone[name].token_ids for name in alone}
    for name, length in (*((str(length), length) for length in LENGTHS), ("stopped", 71)):
        *probabilities, too_long = found[name].verdicts
        assert too_long is None
        assert probabilities == pytest.approx([*verdicts_of(model, length)], abs=1e-4)


def test_a_prompt_that_is_asked_again_does_not_see_the_questions(spelling_pair):
    """They stand where the rest of the prompt stood, whose rows the next prompt would take over."""
    engine = tiny_engine(spelling_pair, "good", decoding__max_batch_size=1)
    written = of_length(400, ROOM)
    asking = replace(written, request_id="asked", questions=partial(asks, 400))
    [expected] = engine.generate([written])
    found = [*engine.generate([asking, replace(written, request_id="again")])]
    assert [each.token_ids for each in found] == [expected.token_ids] * 2
    assert 256 < found[1].stats.num_cached_tokens < 390


@pytest.mark.parametrize("most", [1, 12])
def test_an_answer_without_room_breaks_off(spelling_pair, most):
    [found] = tiny_engine(spelling_pair, "good").generate([replace(asked(40), max_new_tokens=most)])
    assert found.finish_reason == "length"
    assert 0 < len(found.token_ids) <= most


@pytest.mark.parametrize(
    "fields",
    [
        "{kind: a | b, why: string}",
        "{kind: {enum: [a, b], maxLength: 1}}",
        "{kinds: [a | b]}",
        "{same: {const: always}}",
    ],
)
def test_what_has_to_be_written_is_not_scored(fields):
    """Also where a keyword may take values out, and where there is nothing to choose."""
    assert choices_of(schema_of(yaml.safe_load(fields))) == ()
