"""How sure the target is of an answer: log probabilities, and verdicts on its sentences."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pyarrow as pa

from specextend.core import Completion, Questions, Values, json_values, read_json
from specextend.data.answers import answer_fields
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompt, Prompts
from specextend.data.quality import sentences_of, split_words, strings_of
from specextend.data.rows import Row

CONFIDENCE = pa.list_(
    pa.struct([("field", pa.string()), ("log_prob", pa.float64()), ("text", pa.string())])
)
"""Fields of an answer, or `whole` and `least` with its sentence."""
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


# Verdicts


Claim = tuple[str | None, str]
"""A field and a string of an answer, or None and a sentence of a text."""


def claims_of(answer: str, fields: Collection[str] | None) -> list[Claim]:
    """Return the distinct claims of an answer in order.

    Args:
        fields: Fields with strings that are claims; None for a text.
    """
    found: list[Claim]
    if fields is None:
        found = [(None, answer[begin:end]) for begin, end in sentences_of(answer)]
    else:
        try:
            found = [each for each in strings_of(read_json(answer), "") if each[0] in fields]
        except ValueError:
            return []  # it broke off
    return [claim for claim in dict.fromkeys(found) if split_words(claim[1])]


def check_questions(prompts: Prompts, max_new_tokens: int | None) -> None:
    """Raise ValueError if no question fits after outputs of `max_new_tokens` (None: any number)."""
    if prompts.begins_thinking:
        raise ValueError(
            "output.verify asks for Yes or No, and the model begins by thinking: set "
            "prompt.template_options to what keeps it from that, such as {enable_thinking: false}"
        )
    try:
        prompt = prompts.render("x", 0)
    except DocumentError as error:
        raise ValueError(f"output.verify: {error.message}") from error
    before, after = prompts.options.question
    asked = prompts.questions(prompt, "x", None, [f"{before}x{after}"])
    if not asked.token_ids:
        raise ValueError(
            "output.verify: the chat template does not end a prompt in one way, so that no "
            "question can stand there; leave out output.verify"
        )
    size = len(asked.token_ids[0]) - (len(prompt.token_ids) - asked.num_read)
    if max_new_tokens is not None and size > max_new_tokens:
        raise ValueError(
            f"output.verify: the question takes {size} tokens without its sentence, and "
            f"decoding.max_new_tokens leaves room for {max_new_tokens}: raise it, or shorten "
            "prompt.verification"
        )


def questions_about(
    prompts: Prompts, row: Row, prompt: Prompt, fields: Collection[str] | None
) -> Callable[[str, list[int]], Questions]:
    """Return the function `Request.questions` for a document."""
    return partial(_questions, prompts, row, prompt, fields)


def _questions(
    prompts: Prompts,
    row: Row,
    prompt: Prompt,
    fields: Collection[str] | None,
    text: str,
    token_ids: list[int],
) -> Questions:
    answer, _ = prompts.told_apart(text, token_ids)
    said = [
        claim if field is None else f"{field}: {claim}"
        for field, claim in claims_of(answer, fields)
    ]
    before, after = prompts.options.question
    asked = [f"{before}{each}{after}" for each in said]
    try:
        return prompts.questions(prompt, row.text, row.instruction, asked)
    except DocumentError:  # of a template that refuses what a sentence says
        return Questions(len(prompt.token_ids), [], 0, 0)


def verdict_rows(
    answer: str, fields: Collection[str] | None, probabilities: Iterable[float | None]
) -> list[Values]:
    """Return the entries of the column `verdicts`, with probability None for claims not asked."""
    claims = claims_of(answer, fields)
    found = [*probabilities] or [None] * len(claims)
    return [
        {"field": field, "sentence": claim, "probability": probability}
        for (field, claim), probability in zip(claims, found, strict=True)
    ]
