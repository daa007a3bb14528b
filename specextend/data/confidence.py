"""Confidence: mean log probabilities of the target for its text."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import pyarrow as pa

from specextend.core import Completion, Values, json_values
from specextend.data.answers import answer_fields
from specextend.data.quality import sentences_of

CONFIDENCE = pa.list_(
    pa.struct([("field", pa.string()), ("log_prob", pa.float64()), ("text", pa.string())])
)
"""Column of commits: fields of an answer, or `whole` and `least` with its sentence."""
_OF_TEXT = pa.struct([("whole", "float64"), ("least", "float64"), ("least_sentence", "string")])


def confidence_of(
    completion: Completion, answer: str, is_object: bool, decode: Callable[[list[int]], str]
) -> list[Values]:
    """Return the entries of the column `confidence`.

    Args:
        completion: Output with log probabilities, or with scored choices.
        answer: Its text without reasoning.
        is_object: Whether the answer is a JSON object.
        decode: Decodes the first tokens of an output.
    """
    if completion.scored and not completion.log_probs:
        best: dict[str, float] = {}
        for each in completion.scored:
            best[each.field] = max(each.log_prob, best.get(each.field, each.log_prob))
        return [_entry(name, log_prob) for name, log_prob in best.items()]
    ends = _Ends(completion.token_ids, decode)
    begin = completion.text.rfind(answer)

    def mean(spans: Iterable[tuple[int, int]]) -> float | None:
        places = {at for first, last in spans for at in ends.within(begin + first, begin + last)}
        return fmean(completion.log_probs[at] for at in sorted(places)) if places else None

    if is_object:
        return [
            _entry(name, mean(_leaves(answer, first, last)))
            for name, first, last in json_values(answer)
        ]
    means = [
        (found, answer[slice(*span)])
        for span in sentences_of(answer)
        if (found := mean([span])) is not None
    ]
    least = min(means, default=(None, None), key=lambda each: each[0] or 0.0)
    return [_entry("whole", mean([(0, len(answer))])), _entry("least", *least)]


def confidence_field(schema: str | None) -> pa.Field:
    """Return the column `confidence` of `summaries/`."""
    names = [field.name for field in answer_fields(schema)]
    return pa.field("confidence", pa.struct([(name, "float64") for name in names] or _OF_TEXT))


def confidence_column(schema: str | None, entries: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column `confidence` from the entries in commits."""
    field = confidence_field(schema)
    values = []
    for each in entries.to_pylist():
        known = {entry["field"]: entry["log_prob"] for entry in each or ()}
        known["least_sentence"] = next((e["text"] for e in each or () if e["text"]), None)
        values.append(known if each else None)
    return pa.chunked_array([pa.array(values, field.type)])


class _Ends:
    def __init__(self, token_ids: Sequence[int], decode: Callable[[list[int]], str]):
        self._token_ids = list(token_ids)
        self._decode = decode
        self._known: dict[int, int] = {}

    def _end(self, number: int) -> int:
        if number not in self._known:
            text = self._decode(self._token_ids[:number])
            is_whole = number == len(self._token_ids)
            self._known[number] = len(text if is_whole else text.rstrip("\ufffd"))
        return self._known[number]

    def within(self, begin: int, end: int) -> range:
        """Return the tokens that overlap characters `begin` to `end`."""
        if begin == end:
            return range(0)
        numbers = range(len(self._token_ids) + 1)
        first = bisect_right(numbers, begin, key=self._end) - 1
        return range(first, bisect_left(numbers, end, lo=first, key=self._end))


def _leaves(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    if text[begin] in "{[":
        for _, first, last in json_values(text, begin):
            yield from _leaves(text, first, last)
    elif text[begin] == '"':
        yield begin + 1, end - 1
    else:
        yield begin, end


def _entry(name: str, log_prob: float | None, text: str | None = None) -> Values:
    entry: dict[str, Any] = {"field": name, "log_prob": log_prob, "text": text}
    return entry
