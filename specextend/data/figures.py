"""Find the figures of a text in its document: exact, rounded, or derived from two others.

Begin at `find_figures`. Workers keep a `FigureIndex` of the document. `data/numerals.py` reads
figures.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from functools import cached_property
from itertools import islice, pairwise
from operator import itemgetter
from typing import Literal, NamedTuple

from specextend.core import Values
from specextend.data.numerals import Date, Figure, figures_of, lowered

Found = Literal["yes", "rounded", "derived", "no"]
_NEAR = 100
_MOST_PLACES = 20
_LEAST_SHARED = 3
"""Fewest shared words for a derived figure, or one of two digits, since small figures are
everywhere.
"""
_LEAST_KNOWN = 0.2
"""Share of surrounding words in the document, below which it is in another language."""
_CONTENT = re.compile(r"[^\W\d_]{4,}")
_PASSAGE_END = re.compile(r"[.!?]['\")\]\u201d\u2019]*\s+(?=[A-Z\u00c0-\u00de(\"\u201c])|\n\s*\n")


class _Place(NamedTuple):
    found: Found
    value: Decimal | Date
    begin: int | None = None
    end: int | None = None


def find_figures(text: str, document: str) -> list[Values]:
    """Find each figure of a text in its document.

    Returns:
        For each figure: `text`; `kind` (`number`, `money`, `percent`, `date` or `year`); `value`,
        in digits or ISO 8601; `unit`; `found` (`yes`, `rounded`, `derived` from two figures of a
        passage, or `no`); `begin` and `end`, in characters of the document. Unit and place may be
        None.
    """
    return FigureIndex(document).find(text)


class FigureIndex:
    """Figures of a document, read once for several texts."""

    def __init__(self, document: str):
        self._low = lowered(document)
        self._document = document
        self._figures = figures_of(document)
        self._exact = defaultdict[Decimal | Date, list[Figure]](list)
        for figure in self._figures:
            for one in (figure, *figure.parts):
                for value in one.values:
                    self._exact[value].append(one)
                    if isinstance(value, Date) and value.year:
                        self._exact[Decimal(value.year)].append(one)
        self._numbers = [each for each in self._figures if each.kind not in ("date", "year")]
        numbers = [
            (float(value), each)
            for each in self._numbers
            for value in each.values
            if isinstance(value, Decimal)
        ]
        self._sorted = sorted(numbers, key=itemgetter(0))

    def find(self, text: str, *, has_units: bool = True) -> list[Values]:
        """Find each figure of a text, as `find_figures` does.

        Args:
            has_units: False for a number that may have any unit.
        """
        found: list[Values] = []
        for written in figures_of(text):
            if written.is_claimed:
                figure = written if has_units else written._replace(unit=None)
                record = self._record(figure, text)
                is_split = record["found"] == "no" and figure.parts
                found += [self._record(part, text) for part in figure.parts if is_split] or [record]
        return found

    def _record(self, figure: Figure, text: str) -> Values:
        place = self._place_of(figure, text)
        return {
            "text": text[figure.begin : figure.end],
            "kind": figure.kind,
            "unit": figure.unit or None,
            **place._asdict(),
            "value": str(place.value) if isinstance(place.value, Date) else f"{place.value:f}",
        }

    def _place_of(self, figure: Figure, text: str) -> _Place:
        around = _words(text[max(0, figure.begin - _NEAR) : figure.end + _NEAR])
        for value in figure.values:
            places = self._exact.get(value, ())
            if best := self._most_alike(figure, places, around):
                return _Place("yes", value, best.begin, best.end)
        for value in figure.values:
            if isinstance(value, Date):
                place = self._date(value)
            else:
                place = self._rounded(figure, value, around) or self._derived(figure, value, text)
            if place:
                return place
        return _Place("no", figure.values[0])

    def _most_alike(
        self, figure: Figure, places: Iterable[Figure], around: set[str]
    ) -> Figure | None:
        """Return the best place: same unit first, then most words in common."""
        fitting = (each for each in places if _may_be(figure, each))
        ranked = [
            (each.unit == figure.unit, _num_in(self._near(each), around), each)
            for each in islice(fitting, _MOST_PLACES)
        ]
        if not ranked:
            return None
        has_unit, num_shared, best = max(ranked, key=lambda each: each[:2])
        needed = min(_LEAST_SHARED, len(around) // 3)
        if has_unit and (figure.kind in ("date", "year") or len(_digits(figure.values[0])) > 2):
            needed = 0
        if num_shared >= needed:
            return best
        num_known = _num_in(self._low, around)
        return best if num_known < _LEAST_KNOWN * len(around) else None

    def _near(self, figure: Figure) -> str:
        return self._low[max(0, figure.begin - _NEAR) : figure.end + _NEAR]

    def _date(self, date: Date) -> _Place | None:
        for each in self._figures:
            for other in each.values:
                if isinstance(other, Date) and _is_within(other, date):
                    return _Place("rounded", date, each.begin, each.end)
        without = self._exact.get(date._replace(year=0))
        if without and Decimal(date.year) in self._exact:
            return _Place("derived", date, without[0].begin, without[0].end)
        return None

    def _rounded(self, figure: Figure, value: Decimal, around: set[str]) -> _Place | None:
        step = _last_digit(figure, value)
        if not step:
            return None
        most = step * (1 if figure.is_about else 0.5) * (1 + 1e-9)
        first, last = (
            bisect_left(self._sorted, float(value) + side, key=itemgetter(0))
            for side in (-most, most)
        )
        near = self._sorted[first:last]
        places = (each for other, each in near if figure.is_share or other / step % 1)
        best = self._most_alike(figure, places, around)
        return best and _Place("rounded", value, best.begin, best.end)

    @cached_property
    def _bounds(self) -> list[int]:
        ends = (found.start() for found in _PASSAGE_END.finditer(self._document))
        return [0, *ends, len(self._document)]

    def _derived(self, figure: Figure, value: Decimal, text: str) -> _Place | None:
        """Return two neighbours in a passage with this sum, difference, ratio or change."""
        if figure.kind == "year" or value < (10 if figure.unit else 100):
            return None
        ends = [found.end() for found in _PASSAGE_END.finditer(text, 0, figure.begin)]
        end = _PASSAGE_END.search(text, figure.end)
        sentence = _words(text[(ends or [0])[-1] : end.start() if end else len(text)])
        for one, other in pairwise(self._numbers):
            if one.unit == other.unit and _follows(figure, value, one, other):
                last = bisect_right(self._bounds, one.begin)
                passage = self._low[self._bounds[last - 1] : self._bounds[last]]
                is_one = other.begin < self._bounds[last]
                if is_one and _num_in(passage, sentence) >= _LEAST_SHARED:
                    return _Place("derived", value, one.begin, other.end)
        return None


def _may_be(figure: Figure, other: Figure) -> bool:
    units = {figure.unit, other.unit}
    return figure.unit is None or len(units) == 1 or ("" in units and "%" not in units)


def _num_in(text: str, words: Iterable[str]) -> int:
    return sum(word in text for word in words)


def _words(text: str) -> set[str]:
    return {*_CONTENT.findall(text.lower())}


def _digits(value: Decimal | Date) -> tuple[int, ...]:
    return value.normalize().as_tuple().digits if isinstance(value, Decimal) else ()


def _is_within(date: Date, other: Date) -> bool:
    return date.month == other.month and other.day in (0, date.day) and other.year in (0, date.year)


def _last_digit(figure: Figure, value: Decimal) -> float:
    if figure.kind == "year":
        return 0.0
    if figure.is_share:
        return 2.0
    _, digits, exponent = value.as_tuple()
    is_small = len(digits) + int(exponent) < 2 and not figure.unit
    if is_small and int(exponent) >= 0:
        return 0.0
    kept = max(len(_digits(value)), 1 if figure.is_about else 2)
    zeros = max(0, len(digits) - kept) if int(exponent) >= 0 else 0
    return 10.0 ** (int(exponent) + zeros)


def _follows(figure: Figure, value: Decimal, one: Figure, other: Figure) -> bool:
    a, b = (float(each.values[0]) for each in (one, other) if isinstance(each.values[0], Decimal))
    if figure.unit == one.unit:
        step = 1e-9 * float(value)
        results = [a + b, abs(a - b)]
    elif figure.unit == "%" and one.unit != "%" and a and b:
        step = _last_digit(figure, value) / 2
        results = [100 * a / b, 100 * b / a, 100 * abs(a - b) / a, 100 * abs(a - b) / b]
    else:
        return False
    return any(abs(each - float(value)) <= step for each in results)
