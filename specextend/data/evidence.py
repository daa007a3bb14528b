"""Where the strings of an answer stand in its document: the first check against invention."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from rapidfuzz.fuzz import partial_ratio_alignment

LEAST_SCORE = 90.0
"""Similarity from 0 to 100 (2 x matching characters over those of both) from which a passage counts as a value's."""
LEAST_LENGTH = 6
"""Characters from which a value may stand in its document nearly, and not as whole words: fewer are like anything."""
_SPACES = str.maketrans("\t\n\r\u00a0", "    ")


def find_evidence(text: str, document: str, fields: Collection[str]) -> list[dict[str, Any]]:
    """Find each string in the `fields` of an answer (JSON) in its document, in time linear in it.

    Returns for each its `field` and `value` with `begin` and `end`, in characters of the document, of the first passage
    of whole words that equals it, case and kinds of space aside, or else of the most similar one, and the passage's
    `score` from 90 to 100. The three are null if there is none.
    """
    plain, found = _plain(document), list[dict[str, Any]]()
    for field, value in _strings(json.loads(text), ""):
        if field in fields and value.strip():
            begin, end, score = _passage(_plain(value.strip()), plain) or (None, None, None)
            found.append({"field": field, "value": value, "begin": begin, "end": end, "score": score})
    return found


def _passage(value: str, document: str) -> tuple[int, int, float] | None:
    if equal := re.search(rf"(?<!\w){re.escape(value)}(?!\w)", document):
        return *equal.span(), 100.0
    if len(value) > len(document) or len(value) < LEAST_LENGTH:  # the first would be looked for in the value
        return None
    match = partial_ratio_alignment(value, document, score_cutoff=LEAST_SCORE)
    return None if match is None else (*_whole_words(document, match.dest_start, match.dest_end), match.score)


def _whole_words(document: str, begin: int, end: int) -> tuple[int, int]:
    """Return where the words of a passage begin and end, without the space around them."""
    while begin > 0 and document[begin].isalnum() and document[begin - 1].isalnum():
        begin -= 1
    while end < len(document) and document[end - 1].isalnum() and document[end].isalnum():
        end += 1
    passage = document[begin:end]
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
