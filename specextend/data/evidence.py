"""Where the strings of an answer stand in its document: the first check against invention."""

from collections.abc import Collection, Iterator
from typing import Any

from rapidfuzz.fuzz import partial_ratio_alignment

from specextend.core import Values, read_json

LEAST_SCORE = 90.0
"""Similarity from 0 to 100 (2 x matching characters over those of both) from which a passage counts as a value's."""
LEAST_LENGTH = 6
"""Characters from which a value may stand in its document nearly, and not as whole words: fewer are like anything."""
_MOST_PLACES = 1000
"""Places inside of words that are passed over."""
_OTHER_SCRIPTS = "\u0590"
"""The first character behind Latin, Greek, Cyrillic and Armenian letters."""
_SPACES = str.maketrans("\t\n\r\u00a0", "    ")


def find_evidence(text: str, document: str, fields: Collection[str]) -> list[Values]:
    """Find each string in the `fields` of an answer (JSON) in its document, in time linear in it.

    Returns for each its `field` and `value` with `begin` and `end`, in characters of the document, of the first passage
    of whole words that equals it, case and kinds of space aside, or else of the most similar one, and the passage's
    `score` from 90 to 100. The three are null if there is none.
    """
    plain, found = _plain(document), list[Values]()
    for field, value in _strings(read_json(text), ""):
        if field in fields and value.strip():
            begin, end, score = _passage(_plain(value.strip()), plain) or (None, None, None)
            found.append({"field": field, "value": value, "begin": begin, "end": end, "score": score})
    return found


def _passage(value: str, document: str) -> tuple[int, int, float] | None:
    begin = document.find(value)
    for _ in range(_MOST_PLACES):
        if begin < 0:
            break
        if not any(_is_in_a_word(document, place) for place in (begin, begin + len(value))):
            return begin, begin + len(value), 100.0
        begin = document.find(value, begin + 1)
    if len(value) > len(document) or len(value) < LEAST_LENGTH:  # the first would be looked for in the value
        return None
    match = partial_ratio_alignment(value, document, score_cutoff=LEAST_SCORE)
    if match is None:
        return None
    begin, end = match.dest_start, match.dest_end
    return *((begin, end) if match.score == 100 else _whole_words(document, begin, end)), match.score


def _is_in_a_word(text: str, place: int) -> bool:
    """Return True if a number, or a word of a script that puts spaces between words, goes on over a place."""
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    if before.isdigit() or after.isdigit():
        return before.isdigit() and after.isdigit()
    return max(before, after) < _OTHER_SCRIPTS and before.isalpha() and after.isalpha()


def _whole_words(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return where the words of a passage begin and end, without the space around them."""
    while _is_in_a_word(text, begin):
        begin -= 1
    while _is_in_a_word(text, end):
        end += 1
    passage = text[begin:end]
    return begin + len(passage) - len(passage.lstrip()), end - len(passage) + len(passage.rstrip())


def _plain(text: str) -> str:
    """Return a text of the same length in lower case, with one kind of space."""
    lower = text.lower()
    return (lower if len(lower) == len(text) else text).translate(_SPACES)


def _strings(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in a value with the names of their fields, those of inner objects behind a dot."""
    match value:
        case str():
            yield field, value
        case list():
            for each in value:
                yield from _strings(each, field)
        case dict():
            for name, each in value.items():
                yield from _strings(each, f"{field}.{name}" if field else name)
