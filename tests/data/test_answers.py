"""Schemas of answers: what they may say, and the shortest answer, by which a limit of tokens is checked."""

import json

import pyarrow as pa
import pytest

from specextend.data.answers import answer_columns, merge_answers, schema_of, shortest_answer, whole_answer
from specextend.data.commits import CommitWriter, read_commit
from specextend.data.quality import find_evidence


def whole(field, **others):
    return json.dumps({"type": "object", "properties": {"a": field}, "required": ["a"], **others})


@pytest.mark.parametrize(
    "field, shortest",
    [
        ({"type": "string", "$comment": "by hand", "note": "x", "units": "EUR", "example": "a"}, ""),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 3}, [0, 0, 0]),
        ({"enum": ["audit", "law"]}, "law"),
        ({"type": ["string", "null"]}, ""),
        ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 99}]}, None),
        ({"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}, {"b": True}),
        ({"$ref": "#/$defs/kind"}, "x"),
    ],
)
def test_the_shortest_answer_is_one(field, shortest):
    """Keywords that vendors and people add are no errors."""
    schema = schema_of(whole(field, **{"$defs": {"kind": {"const": "x"}}}))
    assert json.loads(shortest_answer(schema)) == {"a": shortest}


@pytest.mark.parametrize("least", [10**9, 10**4])
def test_a_long_string_or_list_takes_no_memory(least):
    """It is only counted; and a string of so many characters may have few tokens."""
    field = {"type": "array", "items": {"type": "string", "minLength": least}, "minItems": least}
    assert len(shortest_answer(whole(field))) < 10**7


def test_fields_of_which_one_is_needed_have_a_shortest_answer():
    """A schema may say so beside its fields, without a type."""
    fields = {"a": {"type": "string"}, "b": {"type": "string"}}
    needs = [{"required": ["a"]}, {"required": ["b"]}]
    assert shortest_answer(json.dumps({"type": "object", "properties": fields, "anyOf": needs})) == "{}"


HALVES = '{"a": "\\ud83d\\ude00 \\ud800", "b": [{"c": "\\udc00\\ud800"}], "d": "\\\\ud800"}'
"""A pair, a half, two halves in the wrong order, and a text that only looks like an escape."""


def test_half_a_surrogate_pair_in_an_answer_is_a_replacement_character(output, done):
    """A model may write one as an escape. It emptied the column, and as evidence it ended the driver."""
    schema = schema_of(
        {
            "a": "string",
            "b": {"type": "array", "items": {"type": "object", "properties": {"c": {"type": "string"}}}},
            "d": "string",
        }
    )
    value = {"a": "\U0001f600 \ufffd", "b": [{"c": "\ufffd\ufffd"}], "d": "\\ud800"}
    assert [each.to_pylist() for each in answer_columns(schema, pa.chunked_array([[HALVES]]))] == [
        [each] for each in value.values()
    ]
    assert json.loads(merge_answers(schema, [HALVES])) == value
    assert json.loads(whole_answer(HALVES) or "") == value
    assert whole_answer('{"a":  "\\u00e9"}') == '{"a":  "\\u00e9"}', "what is right is left as it was written"
    assert whole_answer(HALVES[:-1]) is None
    evidence = find_evidence(HALVES, f"On {value['a']}.", {"a", "b.c"})
    assert [(each["value"], each["begin"]) for each in evidence] == [(value["a"], 3), ("\ufffd\ufffd", None)]
    row = done(0, 0, "half \ud800") | {"evidence": [{"field": "a", "value": "\udfff"}]}
    name = CommitWriter(output, "0000000a").commit([row])
    [written] = read_commit(output, name, ["summary", "evidence"]).to_pylist()
    assert written["summary"] == "half \ufffd"
    assert written["evidence"][0]["value"] == "\ufffd"
