"""Verdicts: whether the target holds each sentence of a text to be supported by its document."""

from collections.abc import Callable, Collection, Iterable
from functools import partial

from specextend.core import Questions, Values, read_json
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompt, Prompts
from specextend.data.quality import sentences_of, split_words, strings_of
from specextend.data.rows import Row

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
