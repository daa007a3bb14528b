"""The column `confidence`: means over the tokens of values and of sentences, without quotes and names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specextend.core import Completion, Scored, json_values
from specextend.data.confidence import confidence_of
from specextend.stats import DecodingStats


def said(pieces):
    """An output whose tokens are pieces of text, each with its log probability."""
    texts = [text for text, _ in pieces]
    log_probs = tuple(value for _, value in pieces)
    token_ids = [*range(len(texts))]
    completion = Completion("a", token_ids, "".join(texts), "stop", DecodingStats(), log_probs=log_probs)
    return completion, lambda token_ids: "".join(texts[token_id] for token_id in token_ids)


def entries(pieces, *, is_object, answer=None):
    completion, decode = said(pieces)
    return {
        each["field"]: (each["log_prob"], each["text"])
        for each in confidence_of(completion, answer or completion.text, is_object, decode)
    }


def test_a_field_counts_the_tokens_that_write_its_values():
    """A token that holds a quote and a letter is the value's, too; names, quotes and brackets are nobody's."""
    pieces = [
        ('{"a', -9.0), ('": "', -9.0), ("au", -1.0), ("dit", -2.0), ('", "sum": ', -9.0), ("1", -0.5), ("2, ", -0.25),
        ('"list": ["', -9.0), ('x", "', -4.0), ('y"', -6.0), ('], "none": ""', -9.0), ("}", -9.0), ("", -9.0),
    ]  # fmt: skip
    found = entries(pieces, is_object=True)
    assert found == {"a": (-1.5, None), "sum": (-0.375, None), "list": (-5.0, None), "none": (None, None)}


def test_a_text_has_that_of_the_whole_and_of_its_least_certain_sentence():
    """What the model thought before, and the token that ends the output, are not of the text."""
    pieces = [("thought.", -9.0), (" It", -1.0), (" rained.", -2.0), (" Cats", -3.0), (" fly.", -4.0), ("", -9.0)]
    found = entries(pieces, is_object=False, answer="It rained. Cats fly.")
    assert found == {"whole": (-2.5, None), "least": (-3.5, "Cats fly.")}
    assert entries([("", -1.0)], is_object=False) == {"whole": (None, None), "least": (None, None)}


def test_a_label_that_was_chosen_has_the_probability_of_its_value():
    scored = (Scored("kind", "a", -0.25), Scored("kind", "b", -1.5), Scored("is", "true", 0.0))
    completion = Completion("a", [1], '{"kind": "a", "is": true}', "stop", DecodingStats(), scored=scored)
    found = confidence_of(completion, completion.text, True, str)
    assert [(each["field"], each["log_prob"]) for each in found] == [("kind", -0.25), ("is", 0.0)]


@given(st.lists(st.binary(max_size=3) | st.sampled_from([b" ", b".", b"\xc3", b"\xa4", b"A"]), max_size=12))
def test_tokens_that_are_parts_of_characters_count_too(pieces):
    """An output may end inside of a character: its last tokens wrote no text that stays."""

    def decode(token_ids):
        return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

    token_ids = [*range(len(pieces))]
    log_probs = tuple(-1.0 - token_id for token_id in token_ids)
    text = decode(token_ids)
    completion = Completion("a", token_ids, text, "length", DecodingStats(), log_probs=log_probs)
    whole, least = confidence_of(completion, text, False, decode)
    assert (whole["log_prob"] is None) == (text == "")
    if text.strip():
        assert least["text"] in text
        assert -len(pieces) <= least["log_prob"] <= -1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_the_places_of_json_values_are_those_that_a_parser_finds(value, is_ascii):
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert {name: json.loads(text[begin:end]) for name, begin, end in json_values(text)} == value
    with pytest.raises(ValueError):
        [*json_values(text[:-1])]
