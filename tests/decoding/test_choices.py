"""Scored answers: the log probabilities are those of plain transformers, whatever runs beside them."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from specextend.core import Questions, SamplingParams
from specextend.data.answers import choices_of, schema_of
from specextend.models.causal_lm import load_tokenizer
from tests.tiny_models import (
    load_reference,
    of_length,
    random_prompt,
    request,
    tiny_engine,
)

FIELDS = {
    "kind": "audit | audit of audits | budget?",
    "agency": " | ".join(f"an office {number}" for number in range(500)),
    "level": {"enum": [1, 10, 100, 2.5]},
    "only": {"const": "this"},
    "closed": "boolean",
}
CHOICES = choices_of(schema_of(FIELDS))
LENGTHS = (40, 71, 150)


@pytest.fixture(scope="module")
def pair(spelling_pair):
    return spelling_pair


@pytest.fixture(scope="module")
@torch.inference_mode()
def own(pair):
    """Each prompt's answer by transformers, a row for each value: its text, and all log probabilities."""
    model = load_reference(pair)
    tokenizer = load_tokenizer(pair.target)
    found = {}
    for length in LENGTHS:
        prompt = random_prompt(length)
        text = ""
        all_log_probs = []
        for choice in CHOICES:
            paths = tokenizer([text + each for each in choice.texts], add_special_tokens=False)["input_ids"]
            inputs = pad_sequence([torch.tensor(prompt + path) for path in paths], batch_first=True)
            log_probs = model(inputs).logits[:, length - 1 : -1].double().log_softmax(-1)
            sums = log_probs.gather(2, inputs[:, length:, None])[:, :, 0]
            sums = torch.stack([each[: len(path)].sum() for each, path in zip(sums, paths, strict=True)])
            all_log_probs.append(sums.log_softmax(0))
            text += choice.texts[int(sums.argmax())]
        found[length] = text, torch.cat(all_log_probs)
    return found


def asked(length, **changes):
    given = of_length(length, 200, temperature=changes.pop("temperature", 0.0), seed=length)
    return replace(given, choices=CHOICES, **changes)


@pytest.mark.parametrize(
    "mode, draft, batch, temperature",
    [("autoregressive", None, 1, 0.0), ("tree", "good", 4, 0.9), ("specextend", "eagle", 2, 0.0)],
)
def test_log_probabilities_are_those_of_transformers(mode, draft, batch, temperature, pair, own):
    """Of 500 values too, beside a text that is written, and whatever the temperature is."""
    given = () if draft is None else (draft,)
    engine = tiny_engine(pair, *given, decoding__mode=mode, decoding__max_batch_size=batch)
    written = request("written", random_prompt(37), 60)
    [alone] = engine.generate([written])
    requests = [written, *(asked(length, temperature=temperature) for length in LENGTHS)]
    found = {completion.request_id: completion for completion in engine.generate(requests)}
    assert found["written"].token_ids == alone.token_ids
    for length in LENGTHS:
        text, log_probs = own[length]
        completion = found[str(length)]
        assert completion.text == text
        assert completion.finish_reason == "stop"
        assert [each.value for each in completion.scored] == [value for each in CHOICES for value in each.values]
        torch.testing.assert_close(
            torch.tensor([each.log_prob for each in completion.scored]), log_probs.float(), atol=1e-4, rtol=1e-4
        )
        answer = json.loads(text)
        assert [*answer] == [*FIELDS]


ROOM = 200
"""Tokens of an output that has questions."""
ASKED = [random_prompt(size, seed=size) for size in (12, 30, 60, 7, 120, 90, 33, ROOM)]
"""What questions end with, a tree full and more; the last one is too long."""


def questions_of(length):
    """Of a prompt whose last ten tokens they replace, with a beginning that all have."""
    shared = random_prompt(40, seed=length)
    return Questions(length - 10, [[*shared, *each] for each in ASKED], 7, 9)


@torch.inference_mode()
def verdicts_of(model, length):
    found = questions_of(length)
    prompt = random_prompt(length)[: found.num_read]
    logits = [model(torch.tensor([[*prompt, *each]])).logits[0, -1, [7, 9]] for each in found.token_ids]
    return [float(each.double().softmax(0)[0]) for each in logits[:-1]]


@pytest.mark.parametrize("mode, draft, batch", [("autoregressive", None, 1), ("tree", "good", 4)])
def test_verdicts_are_those_of_transformers_and_change_no_token(mode, draft, batch, pair):
    """Of an output that ends with its first token, too, and beside outputs that nobody asks about."""
    given = () if draft is None else (draft,)
    engine = tiny_engine(pair, *given, decoding__mode=mode, decoding__max_batch_size=batch)
    requests = [request("unasked", random_prompt(37), 60), *(of_length(length, ROOM) for length in LENGTHS)]
    alone = {each.request_id: each for each in engine.generate(requests)}
    [first] = engine.generate([of_length(71, 1)])
    stops = SamplingParams(stop=(first.text,)) if first.text else SamplingParams()
    asked = [
        requests[0],
        *(replace(each, questions=partial(asks, len(each.prompt_token_ids))) for each in requests[1:]),
    ]
    asked.append(replace(asked[2], request_id="stopped", sampling=stops))
    model = load_reference(pair)
    for found in engine.generate(asked):
        if found.request_id == "unasked":
            assert found.verdicts == ()
            continue
        length = 71 if found.request_id == "stopped" else int(found.request_id)
        if found.request_id != "stopped":
            assert found.token_ids == alone[found.request_id].token_ids
        *probabilities, too_long = found.verdicts
        assert too_long is None
        assert probabilities == pytest.approx(verdicts_of(model, length), abs=1e-4)


def test_a_prompt_that_is_asked_again_does_not_see_the_questions(pair):
    """They stand where the rest of the prompt stood, whose rows the next prompt would take over."""
    engine = tiny_engine(pair, "good", decoding__max_batch_size=1)
    written = of_length(400, ROOM)
    [expected] = engine.generate([written])
    asked = replace(written, request_id="asked", questions=partial(asks, 400))
    found = [*engine.generate([asked, replace(written, request_id="again")])]
    assert [each.token_ids for each in found] == [expected.token_ids] * 2
    assert 256 < found[1].stats.num_cached_tokens < 390


def asks(length, text, token_ids):
    """What a request asks once its output is there."""
    assert token_ids
    return questions_of(length)


@pytest.mark.parametrize("most", [1, 12])
def test_an_answer_without_room_breaks_off(pair, most):
    engine = tiny_engine(pair, "good")
    [found] = engine.generate([replace(asked(40), max_new_tokens=most)])
    assert found.finish_reason == "length"
    assert 0 < len(found.token_ids) <= most


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "a | b", "why": "string"},
        {"kind": {"enum": ["a", "b"], "maxLength": 1}},
        {"kinds": ["a | b"]},
        {"same": {"const": "always"}},
    ],
)
def test_what_has_to_be_written_is_not_scored(fields):
    """Also where a keyword may take values out, and where there is nothing to choose."""
    assert choices_of(schema_of(fields)) == ()
