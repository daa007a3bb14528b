"""The quality of a summary in numbers and flags, so that people can find the ones to distrust.
Nothing is held back.

Words are lower-case runs of letters, marks and digits; each character of a script without spaces is
a word.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from heapq import nlargest
from importlib.util import find_spec
from itertools import islice
from math import log
from operator import itemgetter
from typing import Any, NamedTuple
from unicodedata import normalize

import regex
from rapidfuzz.distance import LCSseq
from rapidfuzz.fuzz import partial_ratio_alignment

from specextend.core import Completion, Values, how_to_install, is_loop, printable, read_json
from specextend.data.figures import FigureIndex

REPEATED_WORDS = 4
"""Length of the runs of words that count as repeated, in words."""
COPIED_WORDS = 8
"""Length of the runs of words that count as copied, in words."""
CONTENT_CHARACTERS = 4
"""Least length of a content word: shorter words are mostly articles and prepositions."""
EXAMPLE_WORDS = 3
"""Length of the runs of words by which an answer is compared with the examples of its prompt."""
MOST_REPEATED = 0.2
"""Share of a summary's runs of words that occurred in it before, above which it is flagged
`repeated_ngrams`.
"""
MOST_COPIED = 0.8
"""Share of a summary's runs of words that are in its document, above which it is flagged
`copied`.
"""
LEAST_WORDS = 10
"""Words of a document with fewer of which its summary is flagged `short_document`."""
MOST_ROUGE_CHARACTERS = 200_000
"""Characters at the start of summary and reference that ROUGE compares."""

_PIECE_CHARACTERS = 1 << 18  # of a document that are split into words at a time
_SAMPLED_CHARACTERS = 1 << 16  # of a text, evenly spaced, by which its script is determined
_SCRIPTS = (
    "Latin", "Greek", "Cyrillic", "Armenian", "Georgian", "Hebrew", "Arabic", "Syriac", "Thaana",
    "Devanagari", "Bengali", "Gurmukhi", "Gujarati", "Oriya", "Tamil", "Telugu", "Kannada",
    "Malayalam", "Sinhala", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Hangul", "Mongolian",
    "Ethiopic", "Cherokee",
)  # fmt: skip
_EAST_ASIAN = r"(?P<EastAsian>[\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}])"  # Japanese mixes them
_SCRIPT = regex.compile(
    r"(?=\p{L})(?:"
    + "|".join([_EAST_ASIAN, *(rf"(?P<{name}>\p{{{name}}})" for name in _SCRIPTS)])
    + ")"
)
_LANGUAGE_CHARACTERS = 4_000  # of a text, in its middle, by which its language is determined
_LEAST_LETTERS = 60  # with fewer of them no language is determined
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_WORD = regex.compile(r"\w+")
_GAP = regex.compile(r"\W")


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    """`quality.*`: What is found out about a summary besides the flags and figures that every
    summary gets.
    """

    language: bool = False
    """Flag a summary `wrong_language` if it is in another language than its document. Needs the
    extra `language`. Close languages, such as Danish and Norwegian, are sometimes confused.
    """


class Quality(NamedTuple):
    """Holds what is known about a summary's quality: columns of its row."""

    quality_flags: list[str]
    """In a fixed order; empty if there is nothing to say."""
    copied_fraction: float | None
    """Share of the summary's runs of 8 words that are in its document; None if it has fewer
    words.
    """
    rouge1: float | None = None
    rouge2: float | None = None
    rougeL: float | None = None  # noqa: N815 (the name of the column)
    evidence: list[Values] | None = None
    """Where an answer's strings stand in the document (`find_evidence`)."""
    sources: list[Values] | None = None
    """The passages that the sentences rest on (`find_sources`)."""
    figures: list[Values] | None = None
    """Where the figures stand in the document (`find_figures`)."""


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
) -> Quality:
    """Assess the summary of a document, in time linear in it.

    num_dropped_tokens: of the document, which were not read. reference: another summary to compare
    with, if any. instruction: what was asked. examples: texts of the examples in the prompt.
    evidence_for: fields of the answer whose strings are looked for in the document, if that is
    wanted. sources_without: characters of the document that
    were not read, if sources of the sentences are wanted. figures_for: fields of the answer whose
    figures are looked for, none for a text, if that is wanted.
    """
    text = completion.text
    summary = split_words(completion.text)
    copied = copied_fraction(summary, document)
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
        or _is_of_examples(text, examples, document),
        "wrong_script": _differ(dominant_script(text), dominant_script(document)),
        "wrong_language": options.language and _differ(language_of(text), language_of(document)),
        "control_characters": printable(text, keep="\t\n\r") != text,
        "shortened": num_dropped_tokens > 0,
        "short_document": len(next(_overlapping_pieces(document), [])) < LEAST_WORDS,
        "figure_not_found": any(each["found"] == "no" for each in figures or ()),
    }
    one, two, longest = (None, None, None) if reference is None else rouge(text, reference)
    evidence = None if evidence_for is None else find_evidence(text, document, evidence_for)
    sources = None if sources_without is None else find_sources(text, document, sources_without)
    raised = [name for name, is_raised in flags.items() if is_raised]
    return Quality(raised, copied, one, two, longest, evidence, sources, figures)


def split_words(text: str) -> list[str]:
    """Return the words of a text in order."""
    text = text.lower().replace("_", " ")
    return _WORD.findall(_UNSPACED.sub(r" \g<0> ", text))


def answer_words(text: str, document: str) -> Values:
    """Return the distinct content words of an answer in order: `held` by its document, and `other`
    ones. Words of fewer than `CONTENT_CHARACTERS` are left out, but for numbers and scripts without
    spaces.
    """
    words = dict.fromkeys(
        word
        for word in split_words(text)
        if len(word) >= CONTENT_CHARACTERS or not word.isalpha() or _UNSPACED.match(word)
    )
    held = {word for piece in _overlapping_pieces(document) for word in piece if word in words}
    return {
        "held": [word for word in words if word in held],
        "other": [word for word in words if word not in held],
    }


def copied_fraction(words: Sequence[str], document: str) -> float | None:
    """Return the share of the runs of 8 words that are in the document; None if there are fewer
    words.
    """
    runs = list(_runs(words, COPIED_WORDS))
    if not runs:
        return None
    wanted = set(runs)
    copied = set[tuple[str, ...]]()
    for piece in _overlapping_pieces(document):
        copied |= wanted.intersection(_runs(piece, COPIED_WORDS))
    return sum(run in copied for run in runs) / len(runs)


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[begin:] for begin in range(length)), strict=False)


def _is_of_examples(text: str, examples: Collection[str], document: str) -> bool:
    """Return True if half of an answer's words stand in examples and not in its document, by runs
    of 3 words. Names of fields are not counted.
    """
    known = {run for example in examples for run in _runs(split_words(example), EXAMPLE_WORDS)}
    strings = [text]
    with suppress(ValueError, RecursionError):
        strings = [value for _, value in _strings(read_json(text), "")]
    values = [*map(split_words, strings)]
    copied = known.intersection(run for words in values for run in _runs(words, EXAMPLE_WORDS))
    for piece in _overlapping_pieces(document) if copied else ():
        copied.difference_update(_runs(piece, EXAMPLE_WORDS))
    num_copied = sum(
        len(
            {
                begin + n
                for begin, run in enumerate(_runs(words, EXAMPLE_WORDS))
                if run in copied
                for n in range(EXAMPLE_WORDS)
            }
        )
        for words in values
    )
    return 2 * num_copied >= max(1, sum(map(len, values)))


def _overlapping_pieces(text: str) -> Iterator[list[str]]:
    """Yield the words of a text of any length piece by piece, with the last words of the piece
    before in front.
    """
    begin = 0
    carried = list[str]()
    while begin < len(text):
        gap = _GAP.search(text, begin + _PIECE_CHARACTERS)
        end = gap.end() if gap else len(text)
        words = carried + split_words(text[begin:end])
        yield words
        begin = end
        carried = words[1 - COPIED_WORDS :]


def dominant_script(text: str) -> str | None:
    """Return the script of more than half of a text's letters; None if there is none, or no
    letter.
    """
    sample = text[:: len(text) // _SAMPLED_CHARACTERS + 1]
    counts = Counter[str | None]()
    for character, count in Counter(sample).items():
        if found := _SCRIPT.match(character):
            counts[found.lastgroup] += count
    [(script, count)] = counts.most_common(1) or [(None, 0)]
    return script if 2 * count > counts.total() else None


def check_library(options: QualityOptions) -> None:
    """Raise ValueError if languages are to be determined and the library for it is not
    installed.
    """
    if options.language and find_spec("py3langid") is None:
        raise ValueError(
            f"quality.language needs the extra `language`: {how_to_install('language')}"
        )


def language_of(text: str) -> str | None:
    """Return the code of a text's language, by its middle; None if that has too few letters to
    tell.
    """
    from py3langid import classify

    begin = max(0, (len(text) - _LANGUAGE_CHARACTERS) // 2)
    # Halves of surrogate pairs cannot be encoded, which the library does.
    middle = text[begin : begin + _LANGUAGE_CHARACTERS].encode(errors="ignore").decode()
    if sum(map(str.isalpha, middle)) < _LEAST_LETTERS:
        return None
    return str(classify(middle)[0])


def _differ(one: str | None, other: str | None) -> bool:
    """Return True if both are known and not the same."""
    return one is not None and other is not None and one != other


def rouge(summary: str, reference: str) -> tuple[float, float, float]:
    """Return the F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, from 0 to 1, without stemming.

    Both texts are cut to `MOST_ROUGE_CHARACTERS`. ROUGE-L compares whole texts, not sentence by
    sentence.
    """
    words, others = (split_words(text[:MOST_ROUGE_CHARACTERS]) for text in (summary, reference))
    one, two = (_shared(words, others, length) for length in (1, 2))
    return one, two, _f_measure(LCSseq.similarity(words, others), len(words) + len(others))


def token_f1(text: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of a text's words."""
    return _shared(split_words(text), split_words(reference), 1)


def _shared(words: Sequence[str], others: Sequence[str], length: int) -> float:
    """Return the F-measure of the runs of words that both texts have, each counted as often as in
    the one that has it less often.
    """
    runs = Counter(_runs(words, length))
    of_others = Counter(_runs(others, length))
    return _f_measure((runs & of_others).total(), runs.total() + of_others.total())


def _f_measure(num_shared: int, num_runs: int) -> float:
    """Return the harmonic mean of precision and recall. num_runs: of both texts together."""
    return 2 * num_shared / num_runs if num_runs else 0.0


# Where the strings of an answer stand in its document: the first check against invention


LEAST_SCORE = 90.0
"""Similarity from 0 to 100 (2 x matching characters over those of both) from which a passage counts
as a value's.
"""
LEAST_LENGTH = 6
"""Characters from which a value may stand in its document nearly, and not as whole words: fewer are
like anything.
"""
MOST_ALIKE = 2000
"""Characters up to which it may: the search takes time by their square."""
_MOST_PLACES = 1000
"""Places inside of words that are passed over."""
_MOST_POWER = 18
"""Power of ten up to which a number of an answer is written out."""
_OTHER_SCRIPTS = "\u0590"
"""The first character behind Latin, Greek, Cyrillic and Armenian letters."""
_SPACES = str.maketrans("\t\n\r\u00a0", "    ")


def find_evidence(text: str, document: str, fields: Collection[str]) -> list[Values]:
    """Find each string in the `fields` of an answer (JSON) in its document, in time linear in it.

    Returns for each its `field` and `value` with `begin` and `end`, in characters of the document,
    of the first passage of whole words that equals it, case and kinds of space aside, or else of
    the most similar one, and the passage's `score` from 90 to 100. The three are null if there is
    none.
    """
    plain = _plain(document)
    found = list[Values]()
    for field, value in _strings(read_json(text), ""):
        if field in fields and value.strip():
            begin, end, score = _passage(_plain(value.strip()), plain) or (None, None, None)
            found.append(
                {"field": field, "value": value, "begin": begin, "end": end, "score": score}
            )
    return found


class _Digits(str):
    """A number of an answer as it is written, which says no unit."""

    __slots__ = ()


def _figures(text: str, document: str, fields: Collection[str]) -> list[Values]:
    """Find the figures of a text, or of the `fields` of an answer (JSON)."""
    index = FigureIndex(document)
    if not fields:
        return index.find(text)
    answer = read_json(text, parse_int=_Digits, parse_float=_written_out)
    return [
        figure
        for field, value in _strings(answer, "")
        if field in fields
        for figure in index.find(value, has_units=not isinstance(value, _Digits))
    ]


def _written_out(number: str) -> _Digits:
    """Return the digits of a number; none if it is too large or small for figures."""
    with suppress(InvalidOperation):
        value = Decimal(number)
        if abs(value.adjusted()) <= _MOST_POWER:
            return _Digits(f"{value:f}")
    return _Digits()


def _passage(value: str, document: str) -> tuple[int, int, float] | None:
    found = regex.finditer(regex.escape(value), document, overlapped=True)
    for begin, end in (each.span() for each in islice(found, _MOST_PLACES)):
        if not _is_in_a_word(document, begin) and not _is_in_a_word(document, end):
            return begin, end, 100.0
    # the first would be looked for in the value
    if not LEAST_LENGTH <= len(value) <= min(len(document), MOST_ALIKE):
        return None
    match = partial_ratio_alignment(value, document, score_cutoff=LEAST_SCORE)
    if match is None:
        return None
    place = (match.dest_start, match.dest_end)
    return *(place if match.score == 100 else _whole_words(document, *place)), match.score


def _is_in_a_word(text: str, place: int) -> bool:
    """Return True if a number, or a word of a script that puts spaces between words, goes on over a
    place.
    """
    if not 0 < place < len(text):
        return False
    before = text[place - 1]
    after = text[place]
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
    # the only one that becomes two
    return text.replace("\u0130", "i").lower().translate(_SPACES)


def _strings(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in a value with the names of their fields, those of inner objects behind a
    dot.
    """
    match value:
        case str():
            yield field, value
        case list():
            for each in value:
                yield from _strings(each, field)
        case dict():
            for name, each in value.items():
                yield from _strings(each, f"{field}.{name}" if field else name)


# What the sentences of a text rest on


MOST_PASSAGES = 3
"""Passages of a sentence, at most."""
LEAST_LIKENESS = 0.15
"""BM25 from which a passage is a source: few of other passages have more, and few of those that are
one have less.
"""
_RUN = 4
"""Letters of the runs that sentence and passage share: words with other endings share most of
them.
"""
_SENTENCE_END = regex.compile(
    # Space after the signs that end a sentence, unless a lower-case word follows an initial or an
    # abbreviation,
    r"(?<=[.!?\u2026\u061f\u06d4\u0964\u0965\u1362]['\"\u201d\u2019\xbb)\]]{0,3})"
    r"(?<!\b(?:\p{Lu}|Mr|Mrs|Ms|Dr|Prof|St|No|vs)\.)\s++(?!\p{Ll})"
    # the place behind signs of scripts without spaces,
    r"|(?<=[\u3002\uff01\uff1f\uff61][\u201d\u2019\u300d\u300f\uff09]{0,3})"
    r"(?![\u201d\u2019\u300d\u300f\uff09\u3002\uff01\uff1f])"
    # and the end of a line before an empty one or an item of a list.
    r"|\R(?=[^\S\r\n]*+(?:\R|[-*\u2022#]|\d{1,3}[.)]\s))\s*+"
)
_STRETCH = regex.compile(r"\S(?:.{0,499}(?<=\S)(?=\s|\Z)|.{0,499}\p{M}*+)", regex.DOTALL)
"""At most 500 characters, up to the end of a word if one ends there; the marks of the last one
belong to it.
"""


def find_sources(text: str, document: str, left_out: range = range(0)) -> list[Values]:
    """Find for each sentence of a text the passages of its document that it rests on: those with
    its rarest words.

    Returns up to three for each `sentence`, the best first: `begin` and `end` in characters of the
    document, `score` and the `passage` itself, a sentence or 500 characters of one. The score is
    the percentage of the sentence's runs of letters, each counted by its rarity, that the passage
    has; in their order short passages come before long ones. The four are null if none is near
    enough. left_out: characters that were not read.
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
    found = list[Values]()
    for sentence, runs in runs_of.items():
        weights = {run: log(1 + (len(spans) + 0.5) / (counts[run] + 0.5)) for run in runs}
        best: list[Any]
        best = [(*spans[number], score) for _, number, score in _best_passages(weights, held)]
        for first, last, score in best or [(None, None, None)]:
            found.append(
                {
                    "sentence": sentence,
                    "begin": first,
                    "end": last,
                    "score": score,
                    "passage": document[first:last] if best else None,
                }
            )
    return found


def sentences_of(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the sentences of a text begin and end."""
    return _passages(text, 0, len(text))


def _best_passages(
    weights: Mapping[str, float], held: Sequence[tuple[int, set[str]]]
) -> list[tuple[float, int, float]]:
    """Return likeness, number and score of the best passages by BM25, the first of equals.

    held: the number of runs of each passage, and those that are wanted.
    """
    usual = max(1.0, sum(length for length, _ in held) / max(1, len(held)))
    total = sum(weights.values())
    found = list[tuple[float, int, float]]()
    for number, (length, runs) in enumerate(held):
        # In the order of the sentence: sums of a set would be rounded as it happens to be ordered.
        share = sum(weight for run, weight in weights.items() if run in runs) / total
        likeness = share * 2.2 / (1.3 + 0.9 * length / usual)  # k1 is 1.2, b 0.75
        if likeness >= LEAST_LIKENESS:
            found.append((likeness, number, 100 * share))
    return nlargest(MOST_PASSAGES, found, key=itemgetter(0))


def _passages(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the sentences in a part of a text begin and end, those that are long in
    stretches.
    """
    cuts = [found.span() for found in _SENTENCE_END.finditer(text, begin, end)]
    for stop, following in [*cuts, (end, end)]:
        for found in _STRETCH.finditer(text, begin, stop):
            yield found.span()
        begin = following


def _runs_of_letters(text: str) -> list[str]:
    """Return the runs of letters in a text's words, in which characters with marks are written in
    one way.
    """
    words = [f" {word} " for word in split_words(normalize("NFKC", text))]
    return [
        word[begin : begin + _RUN]
        for word in words
        for begin in range(max(1, len(word) - _RUN + 1))
    ]
