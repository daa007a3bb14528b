"""Read figures in a text: numbers, money, percentages, dates and years.

Begin at `figures_of`. It reads digits with any separators, words in English, German and French, and
dates in any order. Signs are ignored: a loss of 5, -5 and (5) are the same figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["number", "money", "percent", "date", "year"]


class Date(NamedTuple):
    """A date; missing parts are 0."""

    year: int
    month: int
    day: int

    def __str__(self) -> str:
        end = f"{self.month:02}" + f"-{self.day:02}" * bool(self.day)
        return f"{self.year:04}-{end}" if self.year else f"--{end}"


class Figure(NamedTuple):
    """A figure and its place in the text."""

    begin: int
    end: int
    kind: Kind
    unit: str | None
    """Currency sign, `%`, or a measure such as `year`. Empty without a unit; None if unknown."""
    values: tuple[Decimal | Date, ...]
    """Possible values, the likeliest first. `1,234` has two."""
    is_about: bool = False
    """True if the text calls it rounded."""
    is_share: bool = False
    """True for a share in words, such as two-thirds."""
    parts: tuple[Figure, ...] = ()
    """Figures to try instead if its spaces do not separate thousands."""
    power: int = 0
    is_claimed: bool = True
    """False for unlikely figures: `one`, and numbers of names and lists."""


def _counted(words: str, first: int = 0, step: int = 1) -> dict[str, int]:
    return {word: first + step * place for place, word in enumerate(words.split())}


def _each(values: Mapping[int, str]) -> dict[str, int]:
    return {word: value for value, words in values.items() for word in words.split()}


_SCALES = _each(
    {
        3: "k thousand thousands tausend tsd mille",
        6: "m mn mm mio million millions millionen",
        9: "b bn billion billions mrd milliarde milliarden milliard milliards md mds",
        12: "tn trn trillion trillions billionen",
    }
)
"""Powers of ten. `billion` is English, `Billionen` German."""
_EINER = _counted("null ein zwei drei vier fünf sechs sieben acht neun")
_ZEHNER = _counted("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig", 20, 10)
_DOZENS = ("dozen", "dutzend", "douzaine")
_ROUND = {
    **dict.fromkeys(("hundred", "hundert"), 100),
    **dict.fromkeys(_DOZENS, 12),
    **{word: 10**power for word, power in _SCALES.items() if len(word) > 5},
}
"""Words that continue a number but never begin it: `dozens` is not a figure."""
_NUMBERS = {
    **_counted(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen"
    ),
    **_counted("twenty thirty forty fifty sixty seventy eighty ninety", 20, 10),
    **_counted(
        "deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize", 2
    ),
    **_counted("vingt trente quarante cinquante soixante", 20, 10),
    **_EINER,
    **_ZEHNER,
    **_counted("zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn", 10),
    **{f"{one}und{ten}": _EINER[one] + _ZEHNER[ten] for one in _EINER for ten in _ZEHNER},
    **{f"{one}hundert": 100 * _EINER[one] for one in _EINER},
    "vingts": 20,
    **_ROUND,
}
_ARTICLES = frozenset(("a", "an", "one", "ein", "eine", "einen", "un", "une"))
_ONES = frozenset(("one", "ein", "un"))
_PARTS = _each(
    {
        2: "half hälfte moitié",
        3: "third thirds drittel tiers",
        4: "quarter quarters viertel quart quarts",
        5: "fifth fifths fünftel",
        6: "sixth sixths sechstel",
        8: "eighth eighths achtel",
        10: "tenth tenths zehntel",
    }
)
_MONTHS = _each(
    {
        1: "january jan januar jänner janvier",
        2: "february feb februar février",
        3: "march mar märz mars",
        4: "april apr avril",
        5: "may mai",
        6: "june jun juni juin",
        7: "july jul juli juillet",
        8: "august aug août",
        9: "september sept sep septembre",
        10: "october oct oktober okt octobre",
        11: "november nov novembre",
        12: "december dec dezember dez décembre",
    }
)
_KNOWN = {*_NUMBERS, *_ARTICLES, *_PARTS, *_MONTHS}
_MONEY = {
    "$": r"us\$|\$|us[- ]dollars?|dollars?|usd",
    "€": r"€|euros?|eur",
    "£": r"£|pounds?|gbp",
    "¥": r"¥|yen|jpy",
    "CHF": r"chf|sfr|franken|francs?",
}
_UNITS = {
    **_MONEY,
    "%": r"%|per ?cent|percentage points?|pct|prozent(?:punkten?|punkte)?|pour ?cent|"
    r"points? de pourcentage",
    "year": r"years?|jahren?|jahre|ans?|années?",
    "month": r"months?|monaten?|monate|mois",
    "week": r"weeks?|wochen?|semaines?",
    "day": r"days?|tagen?|tage|jours?",
    "hour": r"hours?|stunden?|heures?",
    "minute": r"minutes?|minuten",
    "km": r"km|kilomet(?:er|re)s?|kilometern",
    "mile": r"miles?|meilen?",
    "kg": r"kg|kilograms?|kilogramm|kilos?",
    "t": r"tons?|tonnes?|tonnen",
    "ha": r"ha|hectares?|hektar",
    "acre": r"acres?",
}
_NAMES = [*_UNITS]
_GAP = r"[^\S\n]?\n?[^\S\n]{0,2}"
_SPACES = "\u00a0\u2009\u202f "
_SIGN = re.compile(
    r"(?<![^\W\d_])(?:"
    + "|".join(f"(?P<u{n}>{each})" for n, each in enumerate(_MONEY.values()))
    + rf"){_GAP}\Z"
)
_ABOUT = re.compile(
    r"\b(?:about|approximately|approx\.|around|roughly|nearly|almost|some|over|than|least|under|"
    r"exceed(?:ed|ing|s)?|up to|close to|rund|etwa|ca\.|knapp|fast|über|als|environ|près de|"
    r"plus de|moins de)\s+\Z"
)
_SCALE = re.compile(
    rf"-?{_GAP}(?P<scale>{'|'.join(sorted(_SCALES, key=len, reverse=True))})(?![^\W_])\.?"
)
_UNIT = re.compile(
    rf"-?{_GAP}(?:d['\u2019]|(?:of|de)\s)?(?:(?:u\.s\.|us)\s)?(?:"
    + "|".join(f"(?P<u{n}>{each})" for n, each in enumerate(_UNITS.values()))
    + r")(?![^\W_])"
)
_RUN = re.compile(rf"[0-9](?:[0-9.,'\u2019/{_SPACES}-]*[0-9])?")
_IN_RUN = re.compile(
    r"(?P<date>[12][0-9]{3}([-/.])[01]?[0-9]\2[0-3]?[0-9](?![0-9])"
    r"|[0-3]?[0-9]([-/.])[0-3]?[0-9]\3(?:[12][0-9]{3}|[0-9]{2})(?![0-9]))"
    rf"|[0-9]{{1,3}}(?:(?P<gap>[{_SPACES}])[0-9]{{3}}(?![0-9])(?:(?P=gap)[0-9]{{3}}(?![0-9]))*)"
    r"(?:[.,][0-9]{1,2}(?![0-9.,]))?"
    r"|[0-9]+(?:[.,'\u2019][0-9]+)*"
)
_SEPARATE = re.compile("[0-9.,]*[0-9]")
_GROUPED = rf"(?!0\D)[0-9]{{1,3}}([.,'\u2019{_SPACES}])[0-9]{{3}}(?:\1[0-9]{{3}})*"
_WHOLE = re.compile(rf"[0-9]+|{_GROUPED}")
_BROKEN = re.compile(rf"(?:[0-9]+|{_GROUPED}(?!\1))[.,]([0-9]+)")
_YEAR = re.compile("(?:1[5-9]|20)[0-9]{2}|2100")
_BLANK = r"(?:[^\S\n]\n?|\n)[^\S\n]?"
_DAY_BEFORE = re.compile(
    rf"(?<![0-9.,/])([0-3]?[0-9])(?:st|nd|rd|th|er|\.)?{_BLANK}(?:of\s|de\s)?\Z"
)
_AFTER_MONTH = re.compile(
    rf"(?:\.?{_BLANK}(?P<day>[0-3]?[0-9])(?:st|nd|rd|th)?(?![0-9]|[.,/][0-9])|\.?)"
    rf"(?:,?{_BLANK}(?:of\s)?(?P<year>[12][0-9]{{3}})(?![0-9]|[.,][0-9]))?"
)
_WORD = re.compile(r"[^\W\d_]+")
_JOINT = re.compile(r"[ -]|[^\S\n]?\n|\s(?:and|und|et)\s|-(?:and|et)-")
_RANGE = re.compile(r"\s?[-\u2013\u2014/]\s?|\s(?:to|and|or|through|bis|und|oder|à|et|ou)\s")
_ONE_IN = re.compile(r"\s(?:in|out of)\s(?:every\s|each\s)?")
_IN_NAME = re.compile(r"(?<!fy)[^\W\d_]-?\Z")
_IN_LIST = re.compile(r"(?:(?:^|\n)\s*|\()\Z")
_LIST_END = re.compile(r"[).](?: |\Z)")
_MOST_DIGITS = 18
_MOST_IN_WORDS = 10**_MOST_DIGITS


def figures_of(text: str) -> list[Figure]:
    """Return the figures of a text in order."""
    low = lowered(text)
    found = [*_in_words(low)]
    taken = {place for each in found for place in range(each.begin, each.end)}
    found += (each for each in _in_digits(low) if taken.isdisjoint((each.begin, each.end - 1)))
    return _related(sorted(found, key=lambda each: each.begin), low)


def lowered(text: str) -> str:
    """Return a text in lower case with the same length."""
    return text.replace("\u0130", "i").lower()  # the only letter that becomes two


def _in_words(low: str) -> Iterator[Figure]:
    run: list[re.Match[str]] = []
    for word in _WORD.finditer(low):
        if word.group() not in _KNOWN:
            continue
        if month := _MONTHS.get(word.group()):
            yield from _date_at(low, word, month)
        elif run and _JOINT.fullmatch(low, run[-1].end(), word.start()):
            run.append(word)
        else:
            yield from _spoken(low, run)
            run = [word]
    yield from _spoken(low, run)


def _date_at(low: str, name: re.Match[str], month: int) -> Iterator[Figure]:
    begin, end = name.span()
    after = _AFTER_MONTH.match(low, end)
    found = after.groupdict() if after else {}
    if before := _DAY_BEFORE.search(low, max(0, begin - 12), begin):
        found = {"day": before[1], "year": None if found["day"] else found["year"]}
        begin = before.start()
    date = Date(int(found["year"] or 0), month, int(found["day"] or 0))
    if after and (date.year or not before):
        end = after.end()
    if date.day < 32 and (date.day or date.year):
        yield Figure(begin, end, "date", "", (date,))


def _spoken(low: str, run: Sequence[re.Match[str]]) -> Iterator[Figure]:
    taken: list[re.Match[str]] = []
    total = current = 0
    for word in (*run, None):
        name = word.group() if word else ""
        number = 1 if name in _ARTICLES else _NUMBERS.get(name, 0)
        whole = _PARTS.get(name, 0)
        if taken and (whole or not word or not _goes_on(name, number, current)):
            value = total + current
            begin = taken[0].start()
            first = taken[0].group()
            if word and 0 < value < whole:
                is_share = first not in _ARTICLES - {"one"} or low.startswith(" of ", word.end())
                yield _share(begin, word.end(), value, whole)._replace(is_claimed=is_share)
            elif value <= _MOST_IN_WORDS:
                made = _in_context(low, begin, taken[-1].end(), (Decimal(value),))
                is_number = len(taken) > 1 or first not in _ARTICLES
                has_unit = bool(made.unit) and made.kind != "number"
                yield made._replace(is_claimed=is_number or has_unit)
            taken = []
            total = current = 0
        if not word or whole or (name in _ROUND and not taken):
            continue
        taken.append(word)
        if number >= 1000:
            total += max(1, current) * number
            current = 0
        elif number == 100 or (name in _DOZENS and current):
            current = min(max(1, current) * number, 2 * _MOST_IN_WORDS)
        else:  # quatre-vingts
            current += 76 if number == 20 and current % 100 == 4 else number


def _goes_on(name: str, number: int, current: int) -> bool:
    tens = current % 100
    if name.startswith("vingt"):
        return tens in (0, 4)
    if number >= 100 or name in _DOZENS:
        return True
    follows = tens in (0, 60, 80) or (number < 10 and tens in _ZEHNER.values())
    return follows and name not in _ARTICLES - _ONES


def _share(begin: int, end: int, part: int, whole: int | Decimal) -> Figure:
    percent = (Decimal(100 * part) / whole).quantize(Decimal("0.0001")).normalize()
    return Figure(begin, end, "percent", "%", (percent,), is_share=True)


def _in_digits(low: str) -> Iterator[Figure]:
    for run in _RUN.finditer(low):
        for each in _IN_RUN.finditer(low, *run.span()):
            if each["date"]:
                dates = _dates(each.group())
                date = Figure(*each.span(), "date", "", dates)
                yield from [date] if dates else _separate(low, *each.span())
            elif values := _readings(each.group()):
                parts = (*_separate(low, *each.span()),) if each["gap"] == " " else ()
                yield _in_context(low, *each.span(), values)._replace(parts=parts)


def _separate(low: str, begin: int, end: int) -> Iterator[Figure]:
    for part in _SEPARATE.finditer(low, begin, end):
        if values := _readings(part.group()):
            yield _in_context(low, *part.span(), values)


def _dates(token: str) -> tuple[Date, ...]:
    one, two, three = map(int, re.split(r"\D", token))
    year = three if three >= 100 else three + (2000 if three < 50 else 1900)
    dates = [Date(year, one, two), Date(year, two, one)]
    if "." in token:
        dates.reverse()
    if one >= 1000:
        dates = [Date(one, two, three)]
    return (*dict.fromkeys(each for each in dates if 0 < each.month < 13 and 0 < each.day < 32),)


def _readings(token: str) -> tuple[Decimal, ...]:
    digits = re.sub(r"\D", "", token)
    if len(digits) > _MOST_DIGITS:
        return ()
    found = [Decimal(digits)] if _WHOLE.fullmatch(token) else []
    if broken := _BROKEN.fullmatch(token):
        found.append(Decimal(digits).scaleb(-len(broken[2])))
    if "." in token:
        found.reverse()
    return (*found,)


def _unit_of(found: re.Match[str] | None) -> str:
    return _NAMES[int(str(found.lastgroup)[1:])] if found else ""


def _in_context(low: str, begin: int, end: int, values: tuple[Decimal, ...]) -> Figure:
    digits = low[begin:end]
    sign = _SIGN.search(low, max(0, begin - 12), begin)
    unit = _unit_of(sign)
    start = sign.start() if sign else begin
    scale = _SCALE.match(low, end)
    after = _UNIT.match(low, scale.end() if scale else end)
    if scale and scale["scale"] in "mb" and not unit and _unit_of(after) not in _MONEY:
        scale = None
        after = _UNIT.match(low, end)
    power = 0
    if scale:
        power = _SCALES[scale["scale"]]
        end = scale.end("scale")
    if after and unit in ("", _unit_of(after)):
        unit = _unit_of(after)
        end = after.end()
    kind: Kind = "money" if unit in _MONEY else "percent" if unit == "%" else "number"
    if not unit and not scale and _YEAR.fullmatch(digits):
        kind = "year"
    is_item = (
        len(digits) < 3
        and _LIST_END.match(low, end)
        and _IN_LIST.search(low, max(0, begin - 8), begin)
    )
    is_name = is_item or _IN_NAME.search(low, max(0, begin - 4), begin)
    return Figure(
        start,
        end,
        kind,
        unit,
        tuple(value.scaleb(power) for value in values),
        bool(_ABOUT.search(low, max(0, start - 16), start)),
        power=power,
        is_claimed=kind == "year" or not is_name,
    )


def _related(figures: Sequence[Figure], low: str) -> list[Figure]:
    """Complete figures from their neighbours: units and scales of ranges, centuries of years, and
    shares such as one in five.
    """
    made = [*figures]
    shares: list[Figure] = []
    for place, (one, other) in enumerate(pairwise(figures)):
        first = one.values[0]
        second = other.values[0]
        if (
            isinstance(first, Date)
            or isinstance(second, Date)
            or other.kind == "year"
            or not second
        ):
            continue
        between = low[one.end : other.begin]
        if not _RANGE.fullmatch(between):
            if first == 1 and _ONE_IN.fullmatch(between):
                shares.append(_share(one.begin, other.end, 1, second))
                made[place] = made[place]._replace(is_claimed=False)
                made[place + 1] = other._replace(is_claimed=False)
        elif one.kind == "year":
            if other.kind == "number" and not other.unit and other.end - other.begin == 2:
                year = first - first % 100 + second
                made[place + 1] = other._replace(
                    kind="year", values=(year, second), is_claimed=True
                )
        elif one.unit in ("", other.unit):
            values = made[place].values
            if other.power and not one.power:
                numbers = (value for value in values if isinstance(value, Decimal))
                values = (*(value.scaleb(other.power) for value in numbers), *values)
            made[place] = made[place]._replace(
                values=values, power=one.power or other.power, unit=other.unit, kind=other.kind
            )
    return sorted([*shares, *made], key=lambda each: each.begin)
