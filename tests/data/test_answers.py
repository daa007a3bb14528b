"""Schemas of answers: what they may say, and the shortest answer, by which a limit of tokens is checked."""

import json
import re

import pyarrow as pa
import pytest

from specextend.core import DocumentKey
from specextend.data.answers import answer_columns, merge_answers, schema_of, shortest_answer, whole_answer
from specextend.data.commits import CommitWriter, read_commit
from specextend.data.quality import find_evidence
from tests.properties.rows import done
from tests.refused import refused


def whole(field, **others):
    return json.dumps({"type": "object", "properties": {"a": field}, "required": ["a"]} | others)


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


BIG = 1413617112501850121
DEFS = {
    "big": {"enum": [-BIG]},
    "open": {"type": "object", "properties": {"b": {"type": "string", "nullable": True}}},
}


@pytest.mark.parametrize(
    "message, field",
    {
        f"output.schema: {BIG} is not decoded exactly, as numbers are up to": {"enum": [1, BIG]},
        f"{BIG} is not decoded exactly": {"type": "array", "items": {"const": BIG}},
        f"{-BIG} is not decoded exactly": {"type": "array", "items": {"$ref": "#/$defs/big"}},
        f"{2**63 - 1} is not decoded exactly": {"type": "integer", "maximum": 2**63 - 1},
        f"{2**53 + 1} is not decoded exactly": {"type": "number", "multipleOf": 2**53 + 1},
        "0.12345678901234567890 is not decoded exactly": '{"const": 0.12345678901234567890}',
        "1E.400 is not decoded exactly": '{"type": "integer", "maximum": 1e400}',
        "two of the fields type, maxLength have the same name": '{"type": "string", "maxLength": 9, "maxLength": 8}',
        'field a: nullable is no keyword .*: write type: \\[TYPE, "null"\\]': {"type": "string", "nullable": True},
        "field a: nullable is no keyword": {"type": "array", "items": {"type": "string", "nullable": True}},
        "field open.b: nullable is no keyword": {"$ref": "#/$defs/open"},
        "field a: exclusiveMinimum must be a number": {"type": "integer", "exclusiveMinimum": True},
        "field a: required must be a list of names": {"type": "string", "required": True},
        "field a: divisibleBy is no keyword .* write multipleOf": {"type": "number", "divisibleBy": 2},
    }.items(),
)
def test_what_a_grammar_would_round_or_pass_over_is_refused(field, message):
    """A label was right in the text and another number in its column; `nullable` fields were never null."""
    defs = {name: each for name, each in DEFS.items() if name in str(field)}
    text = whole("FIELD", **{"$defs": defs}).replace('"FIELD"', field if isinstance(field, str) else json.dumps(field))
    assert re.search(message, refused(schema_of, text))


def test_a_column_holds_the_number_that_the_text_says_or_null():
    """A model writes as many digits as it likes; a column has the same number, or none."""
    schema = schema_of({"a": "number", "b": ["number"], "c": "integer", "d": {"type": "string", "nullable": False}})
    texts = [
        '{"a": 0.1, "b": [1e3, -0.50], "c": 7, "d": "0.1000000000000000000001"}',
        f'{{"a": {BIG}, "b": [1, {BIG}], "c": {BIG}, "d": ""}}',
        f'{{"a": {2**60}, "b": [0.12345678901234567890], "c": 1.5, "d": ""}}',
        '{"a": 1e999, "b": [5e-324], "c": 2.0, "d": ""}',
    ]
    columns = [each.to_pylist() for each in answer_columns(schema, pa.chunked_array([texts]))]
    assert columns[:3] == [
        [0.1, None, float(2**60), None],
        [[1000.0, -0.5], None, None, [5e-324]],
        [7, BIG, None, 2],
    ]
    digits = '{"a": 0.12345678901234567890, "d": "\\ud800"}'
    assert merge_answers(schema, [digits]) == '{"a": 0.12345678901234567890, "d": "\ufffd"}'
    assert whole_answer(digits) == '{"a": 0.12345678901234567890, "d": "\ufffd"}'


@pytest.mark.parametrize("least", [10**9, 10**4])
def test_a_long_string_or_list_takes_no_memory(least):
    """It is only counted; and a string of so many characters may have few tokens."""
    field = {"type": "array", "items": {"type": "string", "minLength": least}, "minItems": least}
    assert len(shortest_answer(whole(field))) < 10**7


def test_fields_of_which_one_is_needed_have_a_shortest_answer():
    """A schema may say so beside its fields, without a type."""
    assert shortest_answer(whole({"type": "string"}, required=[], anyOf=[{"required": ["a"]}])) == "{}"


HALVES = '{"a": "\\ud83d\\ude00 \\ud800", "b": [{"c": "\\udc00\\ud800"}], "d": "\\\\ud800"}'
"""A pair, a half, two halves in the wrong order, and a text that only looks like an escape."""


def test_half_a_surrogate_pair_in_an_answer_is_a_replacement_character(output):
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
    row = done(DocumentKey(0, 0), "half \ud800") | {"evidence": [{"field": "a", "value": "\udfff"}]}
    name = CommitWriter(output, "0000000a").commit([row])
    [written] = read_commit(output, name, ["summary", "evidence"]).to_pylist()
    assert written["summary"] == "half \ufffd"
    assert written["evidence"][0]["value"] == "\ufffd"
