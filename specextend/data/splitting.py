"""Splitting a text that is too long for one prompt into parts, where sections, paragraphs or sentences end. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEAST_SHARE = 0.75
"""A part may end before its even share of what is left to end with a section, a paragraph, or so, but not before this
part of the share."""
_BREAKS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\n(?=#{1,6}\s)|\n(?=[ \t]*(?:chapter|section|part|article|appendix|book)\s+(?:\d+|[ivxlc]+)\b)|\f"
        r"|(?:\n[ \t]*){4}",
        r"\n[ \t]*\n\s*",
        r"[.!?\u2026][\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]\s*",
        r"\n",
        r"\s+",
    )
)
"""Where a text may be cut, the best places first: sections, paragraphs, sentences, lines, words. A cut is at the end of
a match."""


class TextSpan(NamedTuple):
    """A part of a text, in characters."""

    begin: int
    end: int


@dataclass(slots=True)
class _Cuts:
    """A text with the places where it may be cut."""

    text: str
    starts: NDArray[np.int64]
    """The character at which each token starts. [N]."""

    def place(self, token: int) -> int:
        """Return the character at which a token starts; the end of the text behind the last one."""
        return int(self.starts[token]) if token < len(self.starts) else len(self.text)

    def token(self, place: int) -> int:
        """Return the number of the first token that starts at a character or behind it."""
        return int(self.starts.searchsorted(place))

    def cut(self, first: int, wanted: int, last: int) -> int:
        """Find the best place to cut behind token `first`, up to token `last`, and as near to `wanted` as it may be."""
        low, aim, high = (self.place(token) for token in (first, wanted, last))
        for pattern in _BREAKS:
            places = [found.end() for found in pattern.finditer(self.text, low, high) if low < found.end() <= high]
            if places:
                return min(places, key=lambda place: abs(place - aim))
        return aim


def split(text: str, starts: Sequence[int] | NDArray[np.int64], most: int, overlap: int = 0) -> list[TextSpan]:
    """Split a text into parts of at most `most` tokens, all about as long; together they are the whole text.

    Only a part of one character may have more of them.

    starts: the character at which each of its tokens starts, rising. overlap: tokens of a part that the next one
    repeats at most, less than half of `most`. Raises ValueError for one that is not.
    """
    if not 0 <= 2 * overlap < most:
        raise ValueError(f"parts of {most} tokens cannot overlap by {overlap}: less than half must be repeated")
    whole = _Cuts(text, np.asarray(starts, np.int64))
    num_tokens = len(whole.starts)
    spans: list[TextSpan] = []
    begin = first = 0
    while num_tokens - first > most:
        left = num_tokens - first - overlap
        share = overlap + math.ceil(left / math.ceil(left / (most - overlap)))
        end = whole.cut(first + max(overlap + 1, int(_LEAST_SHARE * share)), first + share, first + most)
        end = max(end, begin + 1)  # a character may have more tokens than a part
        spans.append(TextSpan(begin, end))
        begin = max(_next_begin(whole, end, overlap), begin + 1)
        first = whole.token(begin)
    is_over = bool(spans) and begin == len(text)
    return spans if is_over else [*spans, TextSpan(begin, len(text))]


def _next_begin(whole: _Cuts, end: int, overlap: int) -> int:
    """Return where the part behind a cut begins, with what it repeats."""
    if not overlap:
        return end
    last = whole.token(end)
    return min(end, whole.cut(last - overlap, last - overlap, last))


def covered(spans: Sequence[TextSpan]) -> int:
    """Count the characters that are in a span; spans are in order and may overlap."""
    end = count = 0
    for span in spans:
        count += max(0, span.end - max(end, span.begin))
        end = max(end, span.end)
    return count
