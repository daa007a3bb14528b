# ruff: noqa: RUF001 - letters of other scripts are what is tested
"""The passages of a document that the sentences of a text rest on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specextend.data.quality import MOST_PASSAGES, find_sources

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
    [
        ("A second ferry cost 4,310 dollars.", "A second ferry cost 4,310 dollars,\r\nwhich the state paid."),
        ("The state bought a ferry for $4,310", "A second ferry cost 4,310 dollars,\r\nwhich the state paid."),
        ("Work stopped for 12 days.", "- Bakers stopped work for 12 days."),
        ("The observatory's director, Dr. Weiss, left.", "- Dr. Weiss resigned as director of the observatory."),
        ("Elephants never forget.", None),
    ],
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
