"""Splitting a text into parts: nothing is lost, nothing is too long, and cuts are where a reader would make them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.data.splitting import TextSpan, covered, split

WORDS = st.lists(
    st.sampled_from(["word", "a", "end.", "\n", "\n\n", "# head", "Chapter 2", "\f", "。", "é"]), min_size=1
)


def starts_of(text: str) -> list[int]:
    """A token for each word, and for each character between words."""
    return [found.start() for found in re.finditer(r"\w+|\W", text)]


def sizes(text: str, spans: list[TextSpan]) -> list[int]:
    return [sum(span.begin <= start < span.end for start in starts_of(text)) for span in spans]


@given(words=WORDS, most=st.integers(3, 40), overlap=st.integers(0, 8))
@settings(max_examples=200)
def test_the_parts_are_the_whole_text_in_order_and_none_is_too_long(words, most, overlap):
    text, overlap = " ".join(words), min(overlap, (most - 1) // 2)
    spans = split(text, starts_of(text), most, overlap)
    assert (spans[0].begin, spans[-1].end) == (0, len(text))
    assert covered(spans) == len(text)
    assert all(size <= most for size in sizes(text, spans))
    for before, after in pairwise(spans):
        assert before.begin < after.begin <= before.end < after.end
        shared = sum(after.begin <= start < before.end for start in starts_of(text))
        assert shared <= overlap


SENTENCE = "one two three four. "


@pytest.mark.parametrize(
    ("separator", "begins"),
    [
        ("\n# Next\n", "# Next"),
        ("\nChapter IV\n", "Chapter IV"),
        ("\n\n", "one"),
        (" ", "one"),
    ],
    ids=["a heading", "a chapter", "a paragraph", "a sentence"],
)
def test_a_part_ends_where_the_text_does_best(separator: str, begins: str):
    """What is better than a sentence's end wins although it is farther from the middle."""
    text = SENTENCE * 9 + separator + SENTENCE * 11
    [first, second] = split(text, starts_of(text), len(starts_of(text)) * 2 // 3)
    assert text[second.begin :].startswith(begins)
    assert text[first.begin : first.end].rstrip().endswith(".")


def test_parts_are_about_as_long():
    """A last part of three sentences would make a summary as long as itself."""
    text = SENTENCE * 101
    found = sizes(text, split(text, starts_of(text), 250))
    assert max(found) < 1.3 * min(found)


def test_a_character_of_more_tokens_than_a_part_is_a_part():
    """Such characters exist in byte-level vocabularies; the text must come to an end."""
    spans = split("x" * 5, [place for place in range(5) for _ in range(33)], 16, 7)
    assert [(span.begin, span.end) for span in spans] == [(place, place + 1) for place in range(5)]


def test_half_of_a_part_cannot_be_repeated():
    with pytest.raises(ValueError, match="cannot overlap by 20: less than half must be repeated"):
        split(SENTENCE, starts_of(SENTENCE), 40, 20)
