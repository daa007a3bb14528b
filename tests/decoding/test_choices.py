"""Scored answers: the log probabilities are those of plain transformers, whatever runs beside them."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

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
