"""Measure the quality of answers and flag doubtful texts. Nothing is withheld.

Begin at `assess`. A word is a lower-case run of letters, marks and digits, or a single character of
a script without spaces.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from heapq import nlargest
from importlib.util import find_spec
from itertools import islice
from math import log
from operator import itemgetter
from typing import Any, NamedTuple
from unicodedata import name, normalize

import regex
from rapidfuzz.distance import LCSseq
from rapidfuzz.fuzz import partial_ratio_alignment

from specextend.core import Completion, Values, how_to_install, is_loop, printable, read_json
from specextend.data.figures import FigureIndex
from specextend.data.numerals import lowered

REPEATED_WORDS = 4
"""Words in a run for `repeated_ngrams`."""
COPIED_WORDS = 8
"""Words in a run for `copied`."""
CONTENT_CHARACTERS = 4
"""Fewest characters of a content word. Shorter words are mostly articles and prepositions."""
EXAMPLE_WORDS = 3
"""Words in a run when comparing with examples."""
MOST_REPEATED = 0.2
"""Largest share of repeated runs without a flag."""
MOST_COPIED = 0.8
"""Largest share of copied runs without a flag."""
LEAST_WORDS = 10
"""Fewest words of a document without the flag `short_document`."""
MOST_ROUGE_CHARACTERS = 200_000

_SAMPLED_CHARACTERS = 1 << 16  # sampled to determine the script
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO")  # Japanese mixes them
_LANGUAGE_CHARACTERS = 4_000  # in the middle of a text, to determine its language
_LEAST_LETTERS = 60  # fewest letters to determine a language
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_WORD = regex.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """`quality.*`: Optional measurements of a summary."""

    language: bool = False
    """Flag summaries in another language than their document (`wrong_language`). Needs the extra
    `language`. Close languages, such as Danish and Norwegian, are sometimes confused.
    """


class Quality(NamedTuple):
    """Quality columns of a row."""

    quality_flags: list[str]
    copied_fraction: float | None
    """Share of runs of 8 words found in the document; None without such runs."""
    rouge1: float | None = None
    rouge2: float | None = None
    rougeL: float | None = None  # noqa: N815 (the name of the column)
    evidence: list[Values] | None = None
    """See `find_evidence`."""
    sources: list[Values] | None = None
    """See `find_sources`."""
    figures: list[Values] | None = None
    """See `find_figures`."""


def assess(
    completion: Completion,
    document: str,
    num_dropped_tokens: int,
    reference: str | None,
    options: QualityOptions,
    instruction: str = "",
    evidence_for: Collection[str] | None = None,
    sources_without: range | None = None,
    examples: Collection[str] = (),
    figures_for: Collection[str] | None = None,
    verify_below: float | None = None,
) -> Quality:
    """Assess an answer, in time linear in its document.

    Args:
        num_dropped_tokens: Tokens of the document that were not read.
        evidence_for: Fields with strings to find in the document; None for none.
        sources_without: Unread characters of the document, if sources are wanted.
        figures_for: Fields with figures to find, empty for a text; None for none.
        verify_below: Probability of a verdict below which a text is `unsupported`; None for none.
    """
    text = completion.text
    summary = split_words(text)
    read = split_words(document)
    copied = copied_fraction(summary, read)
    asked = split_words(instruction)
    length = min(COPIED_WORDS, len(asked))
    runs = [*_runs(summary, REPEATED_WORDS)]
    figures = None if figures_for is None else _figures(text, document, figures_for)
    flags = {
        "empty": not text.strip(),
        "truncated": completion.finish_reason == "length",
        "repeated": is_loop(completion.token_ids),
        "repeated_ngrams": len(runs) - len({*runs}) > MOST_REPEATED * len(runs),
        "copied": (copied or 0) > MOST_COPIED,
        "echo": (length and not {*_runs(asked, length)}.isdisjoint(_runs(summary, length)))
        or _is_of_examples(text, examples, read),
        "wrong_script": _differ(dominant_script(text), dominant_script(document)),
        "wrong_language": options.language and _differ(language_of(text), language_of(document)),
        "control_characters": printable(text, keep="\t\n\r") != text,
        "shortened": num_dropped_tokens > 0,
        "short_document": len(read) < LEAST_WORDS,
        "figure_not_found": any(each["found"] == "no" for each in figures or ()),
        "unsupported": any(
            each is not None and each < (verify_below or 0) for each in completion.verdicts
        ),
    }
    one, two, longest = (None, None, None) if reference is None else rouge(text, reference)
    evidence = None if evidence_for is None else find_evidence(text, document, evidence_for)
    sources = None if sources_without is None else find_sources(text, document, sources_without)
    raised = [flag for flag, is_raised in flags.items() if is_raised]
    return Quality(raised, copied, one, two, longest, evidence, sources, figures)


def split_words(text: str) -> list[str]:
    """Return the words of a text in order."""
    text = text.lower().replace("_", " ")
    return _WORD.findall(_UNSPACED.sub(r" \g<0> ", text))


def answer_words(text: str, document: str) -> Values:
    """Return the distinct content words of an answer: `held` by its document, and `other` words.

    Numbers and characters of scripts without spaces count at any length.
    """
    words = dict.fromkeys(
        word
        for word in split_words(text)
        if len(word) >= CONTENT_CHARACTERS or not word.isalpha() or _UNSPACED.match(word)
    )
    held = {*split_words(document)}
    return {
        "held": [word for word in words if word in held],
        "other": [word for word in words if word not in held],
    }


def copied_fraction(words: Sequence[str], read: Sequence[str]) -> float | None:
    """Return the share of runs of 8 words found in the document; None without such runs."""
    runs = list(_runs(words, COPIED_WORDS))
    if not runs:
        return None
    copied = {*runs}.intersection(_runs(read, COPIED_WORDS))
    return sum(run in copied for run in runs) / len(runs)


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[begin:] for begin in range(length)), strict=False)


def _is_of_examples(text: str, examples: Collection[str], read: Sequence[str]) -> bool:
    """Return True if half of the words are from examples and not from the document."""
    known = {run for example in examples for run in _runs(split_words(example), EXAMPLE_WORDS)}
    strings = [text]
    with suppress(ValueError, RecursionError):
        strings = [value for _, value in strings_of(read_json(text), "")]
    values = [*map(split_words, strings)]
    copied = known.intersection(run for words in values for run in _runs(words, EXAMPLE_WORDS))
    if copied:
        copied.difference_update(_runs(read, EXAMPLE_WORDS))
    places = {
        (number, begin + n)
        for number, words in enumerate(values)
        for begin, run in enumerate(_runs(words, EXAMPLE_WORDS))
        if run in copied
        for n in range(EXAMPLE_WORDS)
    }
    return 2 * len(places) >= max(1, sum(map(len, values)))


def dominant_script(text: str) -> str | None:
    """Return the script of most letters, as in Unicode's names; None below half of the letters."""
    sample = normalize("NFKC", text[:: len(text) // _SAMPLED_CHARACTERS + 1])
    counts = Counter[str | None]()
    for character, count in Counter(filter(str.isalpha, sample)).items():
        script = name(character, "").split(" ")[0]
        counts["CJK" if script.startswith(_EAST_ASIAN) else script] += count
    [(most, count)] = counts.most_common(1) or [(None, 0)]
    return most if 2 * count > counts.total() else None


def check_library(options: QualityOptions) -> None:
    """Raise ValueError if language detection is wanted and not installed."""
    if options.language and find_spec("py3langid") is None:
        raise ValueError(
            f"quality.language needs the extra `language`: {how_to_install('language')}"
        )


def language_of(text: str) -> str | None:
    """Return the language code of a text, by its middle; None with too few letters."""
    from py3langid import classify

    begin = max(0, (len(text) - _LANGUAGE_CHARACTERS) // 2)
    # The library cannot encode lone surrogates.
    middle = text[begin : begin + _LANGUAGE_CHARACTERS].encode(errors="ignore").decode()
    if sum(map(str.isalpha, middle)) < _LEAST_LETTERS:
        return None
    return str(classify(middle)[0])


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def rouge(summary: str, reference: str) -> tuple[float, float, float]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L as F-measures from 0 to 1, without stemming.

    Texts are cut to `MOST_ROUGE_CHARACTERS`. ROUGE-L compares whole texts.
    """
    words, others = (split_words(text[:MOST_ROUGE_CHARACTERS]) for text in (summary, reference))
    one, two = (_shared(words, others, length) for length in (1, 2))
    return one, two, _f_measure(LCSseq.similarity(words, others), len(words) + len(others))


def token_f1(text: str, reference: str) -> float:
    """Return the F-measure of the words of two texts."""
    return _shared(split_words(text), split_words(reference), 1)


def _shared(words: Sequence[str], others: Sequence[str], length: int) -> float:
    runs = Counter(_runs(words, length))
    of_others = Counter(_runs(others, length))
    return _f_measure((runs & of_others).total(), runs.total() + of_others.total())


def _f_measure(num_shared: int, num_runs: int) -> float:
    return 2 * num_shared / num_runs if num_runs else 0.0


# Find the strings of an answer in its document


LEAST_SCORE = 90.0
"""Lowest similarity of a passage, from 0 to 100: 2 x matching characters over all characters."""
LEAST_LENGTH = 6
"""Fewest characters of a value for similar passages. Shorter values resemble anything."""
MOST_ALIKE = 2000
"""Most characters of a value for similar passages, since the search takes quadratic time."""
_MOST_PLACES = 1000
_MOST_POWER = 18
_LETTER = r"[^\W\d_\u0590-\U0010ffff]"
_INSIDE = regex.compile(rf"(?<=\d)(?=\d)|(?<={_LETTER})(?={_LETTER})")
"""A place inside a number, or inside a word in Latin, Greek, Cyrillic or Armenian letters."""
_SPACES = str.maketrans("\t\n\r\u00a0", "    ")


def find_evidence(text: str, document: str, fields: Collection[str]) -> list[Values]:
    """Find each string in the `fields` of a JSON answer in its document.

    Returns:
        For each string its `field` and `value`, with `begin`, `end` (in characters) and `score` (90
        to 100) of the first equal passage of whole words, ignoring case and kinds of space, or else
        of the most similar passage. None without a passage.
    """
    plain = _plain(document)
    found = list[Values]()
    for field, value in strings_of(read_json(text), ""):
        if field in fields and value.strip():
            begin, end, score = _passage(_plain(value.strip()), plain) or (None, None, None)
            found.append(
                {"field": field, "value": value, "begin": begin, "end": end, "score": score}
            )
    return found


class _Digits(str):
    """A number of an answer, written without a unit."""

    __slots__ = ()


def _figures(text: str, document: str, fields: Collection[str]) -> list[Values]:
    index = FigureIndex(document)
    if not fields:
        return index.find(text)
    answer = read_json(text, parse_int=_Digits, parse_float=_written_out)
    return [
        figure
        for field, value in strings_of(answer, "")
        if field in fields
        for figure in index.find(value, has_units=not isinstance(value, _Digits))
    ]


def _written_out(number: str) -> _Digits:
    with suppress(InvalidOperation):
        value = Decimal(number)
        if abs(value.adjusted()) <= _MOST_POWER:
            return _Digits(f"{value:f}")
    return _Digits()


def _passage(value: str, document: str) -> tuple[int, int, float] | None:
    found = regex.finditer(regex.escape(value), document, overlapped=True)
    for begin, end in (each.span() for each in islice(found, _MOST_PLACES)):
        if not (_INSIDE.match(document, begin) or _INSIDE.match(document, end)):
            return begin, end, 100.0
    # For a shorter document, the library would search it in the value.
    if not LEAST_LENGTH <= len(value) <= min(len(document), MOST_ALIKE):
        return None
    match = partial_ratio_alignment(value, document, score_cutoff=LEAST_SCORE)
    if match is None:
        return None
    place = (match.dest_start, match.dest_end)
    return *(place if match.score == 100 else _whole_words(document, *place)), match.score


def _whole_words(text: str, begin: int, end: int) -> tuple[int, int]:
    while _INSIDE.match(text, begin):
        begin -= 1
    while _INSIDE.match(text, end):
        end += 1
    passage = text[begin:end]
    return begin + len(passage) - len(passage.lstrip()), end - len(passage) + len(passage.rstrip())


def _plain(text: str) -> str:
    return lowered(text).translate(_SPACES)


def strings_of(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in a value with their field names; inner fields are `outer.inner`."""
    match value:
        case str():
            yield field, value
        case list():
            for each in value:
                yield from strings_of(each, field)
        case dict():
            for inner, each in value.items():
                yield from strings_of(each, f"{field}.{inner}" if field else inner)


# Find the sources of sentences


MOST_PASSAGES = 3
LEAST_LIKENESS = 0.15
"""Lowest BM25 of a source, which separates most sources from other passages."""
_RUN = 4
"""Letters in a run. Inflected words share most runs."""
_SENTENCE_END = regex.compile(
    # Space after a sentence, unless it follows an initial or abbreviation, or a lower-case word
    # follows,
    r"(?<=[.!?\u2026\u061f\u06d4\u0964\u0965\u1362]['\"\u201d\u2019\xbb)\]]{0,3})"
    r"(?<!\b(?:\p{Lu}|Mr|Mrs|Ms|Dr|Prof|St|No|vs)\.)\s++(?!\p{Ll})"
    # the end of a sentence in a script without spaces,
    r"|(?<=[\u3002\uff01\uff1f\uff61][\u201d\u2019\u300d\u300f\uff09]{0,3})"
    r"(?![\u201d\u2019\u300d\u300f\uff09\u3002\uff01\uff1f])"
    # and a line end before an empty line or a list item.
    r"|\R(?=[^\S\r\n]*+(?:\R|[-*\u2022#]|\d{1,3}[.)]\s))\s*+"
)
_STRETCH = regex.compile(r"\S(?:.{0,499}(?<=\S)(?=\s|\Z)|.{0,499}\p{M}*+)", regex.DOTALL)
"""Up to 500 characters, ending with a word if possible, never between a letter and its marks."""


def find_sources(text: str, document: str, left_out: range = range(0)) -> list[Values]:
    """Find the passages that support each sentence of a text, with its rarest words.

    Args:
        left_out: Characters of the document that were not read.

    Returns:
        Up to three passages per `sentence`, best first: `begin` and `end` in characters, `passage`
        (a sentence, or 500 characters of it) and `score`, the percentage of the sentence's runs of
        letters, weighted by rarity, in the passage. The order also favours short passages. None
        without a passage.
    """
    sentences = dict.fromkeys(text[begin:end] for begin, end in sentences_of(text))
    runs_of = {sentence: runs for sentence in sentences if (runs := _runs_of_letters(sentence))}
    wanted = {run for runs in runs_of.values() for run in runs}
    read = ((0, left_out.start), (left_out.stop, len(document)))
    spans = [span for begin, end in read for span in _passages(document, begin, end)]
    held = list[tuple[int, set[str]]]()
    for begin, end in spans:
        runs = _runs_of_letters(document[begin:end])
        held.append((len(runs), wanted.intersection(runs)))
    counts = Counter(run for _, runs in held for run in runs)
    usual = max(1.0, sum(length for length, _ in held) / max(1, len(held)))
    found = list[Values]()
    for sentence, wanted_runs in runs_of.items():
        # In the order of the sentence, so that sums are rounded in the same way each time.
        weights = {run: log(1 + (len(spans) + 0.5) / (counts[run] + 0.5)) for run in wanted_runs}
        total = sum(weights.values())
        near = list[tuple[float, tuple[int, int], float]]()
        for span, (length, there) in zip(spans, held, strict=True):
            share = sum(weight for run, weight in weights.items() if run in there) / total
            likeness = share * 2.2 / (1.3 + 0.9 * length / usual)  # k1 = 1.2, b = 0.75
            if likeness >= LEAST_LIKENESS:
                near.append((likeness, span, 100 * share))
        best: list[Values] = [
            {"begin": begin, "end": end, "score": score, "passage": document[begin:end]}
            for _, (begin, end), score in nlargest(MOST_PASSAGES, near, key=itemgetter(0))
        ]
        none = dict.fromkeys(("begin", "end", "score", "passage"))
        found += [{"sentence": sentence, **each} for each in best or [none]]
    return found


def sentences_of(text: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each sentence."""
    return _passages(text, 0, len(text))


def _passages(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    cuts = [found.span() for found in _SENTENCE_END.finditer(text, begin, end)]
    for stop, following in [*cuts, (end, end)]:
        for found in _STRETCH.finditer(text, begin, stop):
            yield found.span()
        begin = following


def _runs_of_letters(text: str) -> list[str]:
    words = [f" {word} " for word in split_words(normalize("NFKC", text))]
    return [
        word[begin : begin + _RUN]
        for word in words
        for begin in range(max(1, len(word) - _RUN + 1))
    ]
