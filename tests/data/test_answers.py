"""Schemas of answers: what they may say, and the shortest answer, by which a limit of tokens is checked."""

from __future__ import annotations

import json

import pytest

from specextend.data.answers import schema_of, shortest_answer


def whole(field: object, **others: object) -> str:
    return json.dumps({"type": "object", "properties": {"a": field}, "required": ["a"], **others})


@pytest.mark.parametrize(
    ("field", "shortest"),
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
def test_a_long_string_or_list_takes_no_memory(least: int):
    """It is only counted; and a string of so many characters may have few tokens."""
    field = {"type": "array", "items": {"type": "string", "minLength": least}, "minItems": least}
    assert len(shortest_answer(whole(field))) < 10**7


def test_fields_of_which_one_is_needed_have_a_shortest_answer():
    """A schema may say so beside its fields, without a type."""
    fields = {"a": {"type": "string"}, "b": {"type": "string"}}
    needs = [{"required": ["a"]}, {"required": ["b"]}]
    assert shortest_answer(json.dumps({"type": "object", "properties": fields, "anyOf": needs})) == "{}"
