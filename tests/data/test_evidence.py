"""Where the strings of an answer stand in its document."""

import json

import pytest

from specextend.data.answers import free_fields, schema_of
from specextend.data.quality import find_evidence

DOCUMENT = "The Department\nof Justice wrote on crimes and punishment. The Department of Justice paid Straße 5."


def passages(fields, document=DOCUMENT):
    """Return field and passage of each string that is looked up."""
    found = find_evidence(json.dumps(fields), document, {"agency", "topics", "meta.land"})
    return [
        (each["field"], each["begin"] if each["begin"] is None else document[each["begin"] : each["end"]])
        for each in found
    ]


@pytest.mark.parametrize(
    "value, passage",
    [
        ("Department of Justice", "Department\nof Justice"),
        (" CRIMES ", "crimes"),
        ("crimes and punishmint", "crimes and punishment"),
        ("Straße", "Straße"),
        ("Department of Agriculture", None),
        ("epartment of Justic", "epartment of Justic"),
        ("he Departmint of Justic", "The Department of Justice"),
        ("5", "5"),
        ("crim", None),
        (DOCUMENT + " And more.", None),
    ],
)
def test_a_string_is_found_where_it_stands_first_or_nearly(value, passage):
    """Case, kinds of space and a wrong letter aside; a passage has whole words; what is not there has no place."""
    assert passages({"agency": value}) == [("agency", passage)]


@pytest.mark.parametrize(
    "value, document, passage",
    [
        ("15", "In 2015, 150 paid 15 each.", "15"),
        ("15", "In 2015, 150 paid.", None),
        ("東京", "私は東京に住む。", "東京"),
        ("$5", "US$5 each", "$5"),
        ("5%", "5%p.a.", "5%"),
        ("Paris", "from _Paris_ on", "Paris"),
        ("12", "a run of 12km", "12"),
        ("Ankara", "İzmir, ANKARA", "ANKARA"),
    ],
)
def test_a_word_or_a_number_is_found_whole(value, document, passage):
    """Two digits of a year prove nothing; scripts without spaces, units and signs have no such borders."""
    assert passages({"agency": value}, document) == [("agency", passage)]


def test_strings_of_lists_and_objects_are_found_by_the_names_of_their_fields():
    """What is null, empty, no string or not asked for is left out."""
    answer = {"topics": ["crimes", None, "peru", ""], "meta": {"land": "Justice", "kind": "crimes"}, "agency": 5}
    assert passages(answer) == [("topics", "crimes"), ("topics", None), ("meta.land", "Justice")]
    assert passages({"agency": "x"}, "") == [("agency", None)]


def test_fields_of_any_text_are_looked_up_and_choices_are_not():
    """A label is no quotation."""
    inner = {"type": "object", "properties": {"land": {"type": ["string", "null"]}, "of": {"$ref": "#/$defs/name"}}}
    schema = {
        "a": {"type": "string"},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "array", "items": inner},
        "d": {"type": "number"},
    }
    whole = {
        "type": "object",
        "properties": schema,
        "$defs": {"name": {"anyOf": [{"type": "null"}, {"type": "string"}]}},
    }
    assert free_fields(schema_of(whole), "string") == {"a", "c.land", "c.of"}
