"""Figures as they are written: numbers, money, percentages, dates and years of a text.

`figures_of` reads digits with any separators, words in English, German and French, and dates in any
order. Signs do not count: a loss of 5, -5 and (5) are one figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

Kind = Literal["number", "money", "percent", "date", "year"]


class Date(NamedTuple):
    """A date; 0 stands for a part that it lacks."""

    year: int
    month: int
    day: int

    def __str__(self) -> str:
        """Write it as in ISO 8601."""
        end = f"{self.month:02}" + f"-{self.day:02}" * bool(self.day)
        return f"{self.year:04}-{end}" if self.year else f"--{end}"


class Figure(NamedTuple):
    """A figure, and its place in the text."""

    begin: int
    end: int
    kind: Kind
    unit: str | None
    """Sign of a currency, `%`, or a measure such as `year`; empty if there is none, None if it is
    not known.
    """
    values: tuple[Decimal | Date, ...]
    """What it may mean, the likeliest first: 1,234 is read in two ways."""
    is_about: bool = False
    """True if the text says that it is rounded."""
    is_share: bool = False
    """True for a share in words, such as two-thirds."""
    parts: tuple[Figure, ...] = ()
    """The figures that it is if the space in it separates thousands after all."""
    power: int = 0
    """Power of ten of its scale."""
    is_claimed: bool = True
    """False for what is hardly meant as a figure: `one`, and the numbers of names and lists."""


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
"""Powers of ten. `billion` is the English one, `Billionen` the German."""
_EINER = _counted("null ein zwei drei vier fünf sechs sieben acht neun")
_ZEHNER = _counted("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig", 20, 10)
_DOZENS = ("dozen", "dutzend", "douzaine")
_ROUND = {
    **dict.fromkeys(("hundred", "hundert"), 100),
    **dict.fromkeys(_DOZENS, 12),
    **{word: 10**power for word, power in _SCALES.items() if len(word) > 5},
}
"""Words that continue a number and begin none: dozens of them are no figure."""
_NUMBERS = {
    **_counted("zero one two three four five six seven eight nine ten eleven twelve"),
    **_counted("thirteen fourteen fifteen sixteen seventeen eighteen nineteen", 13),
    **_counted("twenty thirty forty fifty sixty seventy eighty ninety", 20, 10),
    **_counted("deux trois quatre cinq six sept huit neuf dix onze douze treize", 2),
    **_counted("quatorze quinze seize", 14),
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
"""Those of them that continue a number."""
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
"""Denominators of shares in words."""
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
"""Units, and how they are written."""
_NAMES = [*_UNITS]
_GAP = r"[^\S\n]?\n?[^\S\n]{0,2}"
_SPACES = "\u00a0\u2009\u202f "
_SIGN = re.compile(
    "(?:" + "|".join(f"(?P<u{n}>{each})" for n, each in enumerate(_MONEY.values())) + rf"){_GAP}\Z"
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
_BLANK = r"(?:[^\S\n]\n?|\n)[^\S\n]?"
_DAY_BEFORE = re.compile(
    rf"(?<![0-9.,/])([0-3]?[0-9])(?:st|nd|rd|th|er|\.)?{_BLANK}(?:of\s|de\s)?\Z"
)
_AFTER_MONTH = re.compile(
    rf"\.?{_BLANK}(?:(?P<day>[0-3]?[0-9])(?:st|nd|rd|th)?(?![0-9]|[.,/][0-9])"
    rf"(?:,?{_BLANK}(?P<year>[12][0-9]{{3}})(?![0-9]|[.,][0-9]))?"
    r"|(?:of\s)?(?P<alone>[12][0-9]{3})(?![0-9]))"
)
_AFTER_DAY_AND_MONTH = re.compile(rf"\.?,?{_BLANK}([12][0-9]{{3}})(?![0-9]|[.,][0-9])")
_WORD = re.compile(r"[^\W\d_]+")
_JOINT = re.compile(r"[ -]|[^\S\n]?\n|\s(?:and|und|et)\s|-(?:and|et)-")
_RANGE = re.compile(r"\s?[-\u2013\u2014/]\s?|\s(?:to|and|or|through|bis|und|oder|à|et|ou)\s")
_ONE_IN = re.compile(r"\s(?:in|out of)\s(?:every\s|each\s)?")
_IN_NAME = re.compile(r"(?<!fy)[^\W\d_]-?\Z")
_IN_LIST = re.compile(r"(?:(?:^|\n)\s*|\()\Z")
_MOST_DIGITS = 18
_MOST_IN_WORDS = 10**_MOST_DIGITS
_MOST_YEAR = 2100


def figures_of(text: str) -> list[Figure]:
    """Return the figures of a text, in order."""
    low = lowered(text)
    found = sorted(_in_words(low), key=lambda each: each.begin)
    taken = iter([*found, None])
    other = next(taken)
    for each in _in_digits(low):
        while other is not None and other.end <= each.begin:
            other = next(taken)
        if other is None or each.end <= other.begin:
            found.append(each)
    found.sort(key=lambda each: each.begin)
    return [*_related(found, low)]


def lowered(text: str) -> str:
    """Return a text in lower case with as many characters."""
    return text.replace("\u0130", "i").lower()  # the only letter that becomes two


def _in_words(low: str) -> Iterator[Figure]:
    """Yield dates with names of months, and numbers in words."""
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
    """Yield the date around the name of a month, if it has a day or a year."""
    begin, end = name.span()
    if day := _DAY_BEFORE.search(low, max(0, begin - 12), begin):
        after = _AFTER_DAY_AND_MONTH.match(low, end)
        date = Date(int(after[1]) if after else 0, month, int(day[1]))
        begin = day.start()
    else:
        after = _AFTER_MONTH.match(low, end)
        year = after and (after["year"] or after["alone"])
        date = Date(int(year or 0), month, int((after and after["day"]) or 0))
    if date.day < 32 and (date.day or date.year):
        yield Figure(begin, after.end() if after else end, "date", "", (date,))


def _spoken(low: str, run: Sequence[re.Match[str]]) -> Iterator[Figure]:
    """Yield the numbers and shares in a run of words."""
    taken: list[re.Match[str]] = []
    total = current = 0
    for word in run:
        name = word.group()
        number = 1 if name in _ARTICLES else _NUMBERS.get(name)
        if number is None:
            if taken and 0 < total + current < _PARTS[name]:
                yield _share(low, taken[0], word, total + current)
                taken = []
            number = 0
        elif taken and not _goes_on(name, number, current):
            yield from _number_of(low, taken, total + current)
            taken = []
        if not taken:
            total = current = 0
        if name in _PARTS or (name in _ROUND and not taken):
            continue
        taken.append(word)
        if number >= 1000:
            total += max(1, current) * number
            current = 0
        elif number == 100 or (name in _DOZENS and current):
            current = min(max(1, current) * number, 2 * _MOST_IN_WORDS)
        else:  # quatre-vingts
            current += 76 if number == 20 and current % 100 == 4 else number
    if taken:
        yield from _number_of(low, taken, total + current)


def _goes_on(name: str, number: int, current: int) -> bool:
    """Return True if a word continues a number, of which `current` is what its last scale
    multiplies.
    """
    if number >= 100 or name in _DOZENS:
        return True
    if name in _ARTICLES - _ONES:
        return False
    tens = current % 100
    if name.startswith("vingt"):
        return tens in (0, 4)
    return tens == 0 or (number < 10 and tens >= 20 and tens % 10 == 0) or tens in (60, 80)


def _share(low: str, first: re.Match[str], last: re.Match[str], count: int) -> Figure:
    share = (Decimal(100 * count) / _PARTS[last.group()]).quantize(Decimal("0.0001"))
    is_claimed = first.group() not in _ARTICLES - {"one"} or low.startswith(" of ", last.end())
    return Figure(
        first.start(),
        last.end(),
        "percent",
        "%",
        (share.normalize(),),
        is_share=True,
        is_claimed=is_claimed,
    )


def _number_of(low: str, words: Sequence[re.Match[str]], value: int) -> Iterator[Figure]:
    if value > _MOST_IN_WORDS:
        return
    made = _in_context(low, words[0].start(), words[-1].end(), (Decimal(value),))
    is_article = len(words) == 1 and words[0].group() in _ARTICLES
    yield made._replace(is_claimed=not is_article or (bool(made.unit) and made.kind != "number"))


def _in_digits(low: str) -> Iterator[Figure]:
    for run in _RUN.finditer(low):
        for each in _IN_RUN.finditer(low, *run.span()):
            if each["date"] and (dates := _dates(each.group())):
                yield Figure(*each.span(), "date", "", dates)
            elif each["date"]:
                yield from _separate(low, *each.span())
            elif values := _readings(each.group()):
                figure = _in_context(low, *each.span(), values)
                is_one = each["gap"] != " "
                yield figure if is_one else figure._replace(parts=(*_separate(low, *each.span()),))


def _separate(low: str, begin: int, end: int) -> Iterator[Figure]:
    """Yield the figures that spaces and signs of dates separate."""
    for part in re.compile(r"[0-9.,]*[0-9]").finditer(low, begin, end):
        if values := _readings(part.group()):
            yield _in_context(low, *part.span(), values)


def _dates(token: str) -> tuple[Date, ...]:
    """Return the dates that digits may mean; none if they are no date."""
    one, two, three = map(int, re.split(r"\D", token))
    if one >= 1000:
        dates = [Date(one, two, three)]
    else:
        year = three if three >= 100 else three + (2000 if three < 50 else 1900)
        dates = [Date(year, one, two), Date(year, two, one)]
        if "." in token:
            dates.reverse()
    valid = [each for each in dates if 0 < each.month < 13 and 0 < each.day < 32]
    return tuple(dict.fromkeys(valid))


def _readings(token: str) -> tuple[Decimal, ...]:
    """Return the numbers that digits with separators may mean; none if they are no number."""
    first, *others = groups = re.split(r"\D", token)
    signs = re.sub(r"\d", "", token)
    whole = "".join(groups)
    if len(whole) > _MOST_DIGITS:
        return ()
    if not signs:
        return (Decimal(whole),)
    last = signs[-1]
    broken = Decimal(f"{whole[: -len(others[-1])]}.{others[-1]}")
    is_grouped = len(first) <= 3 and first != "0"
    if len({*signs}) == 1:
        is_whole = is_grouped and all(len(each) == 3 for each in others)
        if len(signs) > 1 or last not in ".,":
            return (Decimal(whole),) if is_whole else ()
        if not is_whole:
            return (broken,)
        return (Decimal(whole), broken) if last == "," else (broken, Decimal(whole))
    ends = signs.count(last) == 1 and last in ".,"
    is_grouped = is_grouped and len({*signs}) == 2 and all(len(each) == 3 for each in others[:-1])
    return (broken,) if ends and is_grouped else ()


def _in_context(low: str, begin: int, end: int, values: tuple[Decimal, ...]) -> Figure:
    """Return a number with the unit and the scale around it."""
    digits = low[begin:end]
    start = begin
    unit = ""
    if begin and low[begin - 1] in "$€£¥ \u00a0\u202ff":
        sign = _SIGN.search(low, max(0, begin - 12), begin)
        if sign and not (sign.start() and low[sign.start() - 1].isalpha()):
            unit = _NAMES[int((sign.lastgroup or "")[1:])]
            start = sign.start()
    is_about = bool(_ABOUT.search(low, max(0, start - 16), start))
    scale = _SCALE.match(low, end)
    behind = _UNIT.match(low, scale.end() if scale else end)
    if scale and len(scale["scale"]) == 1 and not unit and scale["scale"] != "k":
        is_money = behind is not None and _NAMES[int((behind.lastgroup or "")[1:])] in _MONEY
        scale = scale if is_money else None
        behind = behind if is_money else _UNIT.match(low, end)
    if scale:
        values = tuple(value.scaleb(_SCALES[scale["scale"]]) for value in values)
        end = scale.end("scale")
    if behind and unit in ("", name := _NAMES[int((behind.lastgroup or "")[1:])]):
        unit = name
        end = behind.end()
    kind: Kind = "money" if unit in _MONEY else "percent" if unit == "%" else "number"
    is_plain = not unit and not scale and len(digits) == 4 and digits.isdecimal()
    if is_plain and 1500 <= int(digits) <= _MOST_YEAR:
        kind = "year"
    return Figure(
        start,
        end,
        kind,
        unit,
        values,
        is_about,
        power=_SCALES[scale["scale"]] if scale else 0,
        is_claimed=kind == "year" or not _is_name(low, begin, end, digits),
    )


def _is_name(low: str, begin: int, end: int, digits: str) -> bool:
    """Return True if digits number an item of a list, or belong to a name such as H-1B."""
    is_short = len(digits) < 3 and low[end : end + 1] in (")", ".")
    is_item = is_short and low[end + 1 : end + 2] in ("", " ")
    if is_item and _IN_LIST.search(low, max(0, begin - 8), begin):
        return True
    return bool(_IN_NAME.search(low, max(0, begin - 4), begin))


def _related(figures: Sequence[Figure], low: str) -> Iterator[Figure]:
    """Yield figures with what the next or the last one says about them: units and scales of ranges,
    centuries of years, and shares such as one in five.
    """
    is_part = False
    last: Figure | None = None
    for each, other in zip(figures, [*figures[1:], None], strict=False):
        made = each._replace(is_claimed=False) if is_part else each
        is_part = False
        if last and last.kind == "year" and _is_joined(_RANGE, last, each, low):
            made = _with_century(made, last)
        if other and each.kind != "year" and _is_joined(_RANGE, each, other, low):
            made = _ranging(made, other)
        elif other and each.values[0] == 1 and _is_joined(_ONE_IN, each, other, low):
            share = (100 / Decimal(str(other.values[0]))).quantize(Decimal("0.0001")).normalize()
            yield Figure(each.begin, other.end, "percent", "%", (share,), is_share=True)
            made = made._replace(is_claimed=False)
            is_part = True
        yield made
        last = each


def _is_joined(by: re.Pattern[str], one: Figure, other: Figure, low: str) -> bool:
    value = other.values[0]
    is_number = isinstance(value, Decimal) and other.kind != "year" and one.kind != "date"
    return is_number and bool(value) and bool(by.fullmatch(low, one.end, other.begin))


def _with_century(figure: Figure, year: Figure) -> Figure:
    """Return the end of a range of years, as in 2018-19."""
    if figure.kind != "number" or figure.unit or figure.end - figure.begin != 2:
        return figure
    century = Decimal(str(year.values[0])[:2] + "00")
    values = tuple(century + value for value in figure.values if isinstance(value, Decimal))
    return figure._replace(kind="year", values=(*values, *figure.values), is_claimed=True)


def _ranging(figure: Figure, end: Figure) -> Figure:
    """Return the begin of a range, as in 5 to 10 million dollars."""
    if figure.unit not in ("", end.unit):
        return figure
    if end.power and not figure.power:
        numbers = (value for value in figure.values if isinstance(value, Decimal))
        values = (*(value.scaleb(end.power) for value in numbers), *figure.values)
        figure = figure._replace(values=values, power=end.power)
    return figure._replace(unit=end.unit, kind=end.kind)
