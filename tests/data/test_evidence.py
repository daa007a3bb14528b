# ruff: noqa: RUF001 - letters of other scripts are what is tested
"""Where the strings and the sentences of an answer stand in its document."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specextend.data.answers import free_fields, schema_of
from specextend.data.quality import MOST_PASSAGES, find_evidence, find_sources

DOCUMENT = "The Department\nof Justice wrote on crimes and punishment. The Department of Justice paid Straße 5."


def quoted(fields, document=DOCUMENT):
    """Return field and passage of each string that is looked up."""
    found = find_evidence(json.dumps(fields), document, {"agency", "topics", "meta.land"})
    return [
        (each["field"], each["begin"] if each["begin"] is None else document[each["begin"] : each["end"]])
        for each in found
    ]


@pytest.mark.parametrize(
    "value, passage",
    {
        "Department of Justice": "Department\nof Justice",
        " CRIMES ": "crimes",
        "crimes and punishmint": "crimes and punishment",
        "Straße": "Straße",
        "Department of Agriculture": None,
        "epartment of Justic": "epartment of Justic",
        "he Departmint of Justic": "The Department of Justice",
        "5": "5",
        "crim": None,
        DOCUMENT + " And more.": None,
    }.items(),
)
def test_a_string_is_found_where_it_stands_first_or_nearly(value, passage):
    """Case, kinds of space and a wrong letter aside; a passage has whole words; what is not there has no place."""
    assert quoted({"agency": value}) == [("agency", passage)]


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
    assert quoted({"agency": value}, document) == [("agency", passage)]


def test_strings_of_lists_and_objects_are_found_by_the_names_of_their_fields():
    """What is null, empty, no string or not asked for is left out."""
    answer = {"topics": ["crimes", None, "peru", ""], "meta": {"land": "Justice", "kind": "crimes"}, "agency": 5}
    assert quoted(answer) == [("topics", "crimes"), ("topics", None), ("meta.land", "Justice")]
    assert quoted({"agency": "x"}, "") == [("agency", None)]


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


REPORT = (
    "The council of Velden met in May. Its harbour is old.\r\nA second ferry cost 4,310 dollars,\r\nwhich the state "
    "paid.\r\n\r\n- Bakers stopped work for 12 days.\r\n- Dr. Weiss resigned as director of the observatory."
)
PIECES = ["Ferry", "paid", "e\u0301t\u00e9", "שלום", "سلام", "東京", "ไทย", "5", ". ", "? ", "。", "\r\n", "\n\n", " "]
TEXTS = st.lists(st.sampled_from(PIECES)).map("".join)


def passages(text, document=REPORT):
    found = find_sources(text, document)
    assert all(each["passage"] in (None, document[each["begin"] : each["end"]]) for each in found)
    return [(each["sentence"], each["passage"]) for each in found]


@pytest.mark.parametrize(
    "sentence, passage",
    {
        "A second ferry cost 4,310 dollars.": "A second ferry cost 4,310 dollars,\r\nwhich the state paid.",
        "The state bought a ferry for $4,310": "A second ferry cost 4,310 dollars,\r\nwhich the state paid.",
        "Work stopped for 12 days.": "- Bakers stopped work for 12 days.",
        "The observatory's director, Dr. Weiss, left.": "- Dr. Weiss resigned as director of the observatory.",
        "Elephants never forget.": None,
    }.items(),
)
def test_the_passage_that_shares_the_rarest_words_comes_first(sentence, passage):
    """What stands nowhere has no passage, and a row all the same, so that it can be counted."""
    assert passages(sentence)[0] == (sentence, passage)


def test_each_sentence_of_a_text_has_its_passages_the_best_first():
    """Bullets are sentences; one that is repeated, as in a loop, is looked up once."""
    text = "* Velden met in May.\n* It rained.\n\nVelden met in May. Velden met in May. ***"
    document = "It met. Velden met in May. May it. In May it met. Velden is in May."
    sentences = ["* Velden met in May.", "* It rained.", "Velden met in May."]
    found = find_sources(text, document)
    assert [*dict.fromkeys(each["sentence"] for each in found)] == sentences
    assert [each["score"] == 100 for each in found[-MOST_PASSAGES:]] == [True, False, False]


@pytest.mark.parametrize(
    "document, sentence, passage",
    [
        (
            "Une e\u0301cole. Le the\u0301a\u0302tre ferme. Rien.",
            "Le théâtre a fermé.",
            "Le the\u0301a\u0302tre ferme.",
        ),
        ("כמה? \u200fהספינה עלתה 4,310. סוף.", "הספינה עלתה הרבה", "\u200fהספינה עלתה 4,310."),
        ("كم عمره؟ عبّارة ثانية كلفت ٤٣١٠. قال نعم۔", "كلفت عبّارة ٤٣١٠", "عبّارة ثانية كلفت ٤٣١٠."),
        ("私は東京に住む。大阪は遠い。", "大阪は遠いです。", "大阪は遠い。"),
        ("यह एक नाव है। बाज़ार बंद है। और।", "बाज़ार बंद था", "बाज़ार बंद है।"),
    ],
)
def test_places_are_characters_of_the_document_in_any_script(document, sentence, passage):
    """Marks that combine, letters from right to left, and sentences that end without a space or a full stop."""
    assert passages(sentence, document)[0] == (sentence, passage)


@given(TEXTS, TEXTS, st.data())
def test_passages_are_pieces_of_what_was_read_without_space_around_them(document, text, data):
    """A model cannot rest on text that the length policy took out of its prompt."""
    begin = data.draw(st.integers(0, len(document)))
    left_out = range(begin, data.draw(st.integers(begin, len(document))))
    for each in find_sources(text, document, left_out):
        if passage := each["passage"]:
            assert passage == document[each["begin"] : each["end"]] == passage.strip()
            assert each["end"] <= left_out.start or each["begin"] >= left_out.stop


def test_a_text_without_an_end_has_short_passages():
    """A table or a log has no full stops, and a passage of a megabyte helps nobody."""
    document = "\n".join(f"row {number} of the ledger" for number in range(40_000))
    passage = passages("Row 31415 is in the ledger.", document)[0][1]
    assert "row 31415" in passage
    assert len(passage) <= 500
