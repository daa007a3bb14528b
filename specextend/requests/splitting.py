"""Documents too long for one prompt: their parts, and prompts of parts and merges.

Begin at `PartPrompts`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specextend.data.inputs import DocumentError
from specextend.data.instructions import Around
from specextend.data.prompts import Prompt, Prompts, PromptTooLongError

Ints = NDArray[np.int64]
LEAST_TOKENS = 64
_LEAST_SHARE = 0.75
"""Least length of a part that ends early at a section or paragraph, as a fraction of an even share.
"""
_BREAKS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\n(?=#{1,6}\s)|\n(?=[ "
        r"\t]*(?:chapter|section|part|article|appendix|book)\s+(?:\d+|[ivxlc]+)\b)|\f"
        r"|(?:\n[ \t]*){4}",
        r"\n[ \t]*\n\s*",
        r"[.!?\u2026][\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]\s*",
        r"\n",
        r"\s+",
    )
)
"""Ends of these are places to cut, best first: sections, paragraphs, sentences, lines, words."""


class TextSpan(NamedTuple):
    """Character range of a part."""

    begin: int
    end: int


def split(text: str, starts: Sequence[int] | Ints, most: int) -> list[TextSpan]:
    """Split a text into contiguous parts of similar length.

    Args:
        starts: First character of each token, ascending.
        most: Most tokens of a part. Only a part of one character may have more.
    """
    starts = np.asarray(starts, np.int64)
    places = np.append(starts, len(text))
    spans: list[TextSpan] = []
    begin = first = 0
    while (left := len(starts) - first) > most:
        share = math.ceil(left / math.ceil(left / most))
        least, wanted, last = (
            places[min(first + count, len(starts))]
            for count in (max(1, int(_LEAST_SHARE * share)), share, most)
        )
        # a character may have many tokens
        end = max(_best_cut(text, int(least), int(wanted), int(last)), begin + 1)
        spans.append(TextSpan(begin, end))
        begin = end
        first = int(starts.searchsorted(end))
    is_over = bool(spans) and begin == len(text)
    return spans if is_over else [*spans, TextSpan(begin, len(text))]


def _best_cut(text: str, least: int, wanted: int, last: int) -> int:
    for pattern in _BREAKS:
        places = [
            found.end()
            for found in pattern.finditer(text, least, last)
            if least < found.end() <= last
        ]
        if places:
            return min(places, key=lambda place: abs(place - wanted))
    return wanted


class Part(NamedTuple):
    """Part of a document with its prompt."""

    span: TextSpan
    prompt: Prompt


class PartPrompts:
    """Prompts for the parts of long documents, and for merges of their summaries."""

    def __init__(self, prompts: Prompts):
        options = prompts.parts
        task = prompts.options.instruction
        self._most_tokens = options.tokens
        self._part = prompts.with_instruction(options.instruction or task)
        self._merge = prompts.with_instruction(options.merge_instruction or task)

    def check(self, max_new_tokens: int, *, merges: bool = True) -> None:
        """Raise ValueError if a prompt has no room for a part, or for two summaries to merge."""
        try:
            self._size(max_new_tokens, None)
            room = self._merge.room(max_new_tokens)
        except DocumentError as error:
            raise ValueError(f"prompt.length_policy parts: {error.message}") from error
        needed = 2 * (max_new_tokens + self._entry_size(_entry("", 999, 999)))
        if merges and needed > room:
            raise ValueError(
                f"prompt.length_policy parts: two summaries of parts may have {needed} tokens, "
                "but a prompt that "
                f"merges them has room for {room}: lower decoding.max_new_tokens"
            )

    def parts(self, text: str, max_new_tokens: int, instruction: Around | None) -> list[Part]:
        """Split a document and render its parts; white space belongs to the previous part.

        Raises:
            DocumentError: `PromptTooLong`, if a prompt has no room for a part.
        """
        size = self._size(max_new_tokens, instruction)
        starts = self._part.token_starts(text)
        while size > 0:
            try:
                return self._rendered(text, split(text, starts, size), max_new_tokens, instruction)
            except PromptTooLongError:
                size -= 1 + size // 64  # cuts change tokens
        raise DocumentError(
            "PromptTooLong", "a character of it has more tokens than fit", stage="prompt"
        )

    def _rendered(
        self, text: str, spans: Sequence[TextSpan], max_new_tokens: int, instruction: Around | None
    ) -> list[Part]:
        written = [span for span in spans if text[span.begin : span.end].strip()]
        borders = [0, *(span.begin for span in written[1:]), len(text)]
        return [
            Part(
                TextSpan(begin, end),
                self._part.render(text[span.begin : span.end], max_new_tokens, instruction),
            )
            for (begin, end), span in zip(pairwise(borders), written, strict=True)
        ]

    def merges(
        self, texts: Sequence[str], max_new_tokens: int, instruction: Around | None
    ) -> list[Prompt]:
        """Render as few prompts as possible to merge texts; a single prompt is the last merge.

        Raises:
            DocumentError: `PromptTooLong`, if no prompt holds two texts.
        """
        entries = [_entry(text, number, len(texts)) for number, text in enumerate(texts, 1)]
        sizes = [self._entry_size(entry) for entry in entries]
        room = self._merge.room(max_new_tokens, instruction)
        for groups in _groupings(sizes, room):
            joined = ["".join(entries[group.start : group.stop]).strip() for group in groups]
            try:
                return [self._merge.render(text, max_new_tokens, instruction) for text in joined]
            except PromptTooLongError:
                continue  # joining texts may add tokens
        message = (
            f"two summaries of parts have up to {2 * max(sizes)} tokens, a merge has room "
            f"for {room}"
        )
        raise DocumentError("PromptTooLong", message, stage="prompt")

    def work(self, num_tokens: Ints, max_new_tokens: Ints) -> tuple[Ints, Ints]:
        """Estimate prompt tokens [N] and output tokens [N] of all requests of documents in parts.

        Args:
            num_tokens: Tokens of each document [N].
            max_new_tokens: Limits of their summaries [N].
        """
        limits, which = np.unique(max_new_tokens, return_inverse=True)
        sizes = np.array([self._usual_size(limit) for limit in limits.tolist()], np.int64)[which]
        num_parts = -(-np.maximum(1, num_tokens) // sizes)
        templates = num_parts * self._part.num_template_tokens + self._merge.num_template_tokens
        outputs = num_parts * max_new_tokens
        return num_tokens + outputs + templates, outputs + max_new_tokens

    def _entry_size(self, entry: str) -> int:
        return len(self._merge.encode_document(entry)) + 1  # the joint to the next entry

    def _usual_size(self, max_new_tokens: int) -> int:
        try:
            return self._size(max_new_tokens, None)
        except DocumentError:
            return LEAST_TOKENS

    def _size(self, max_new_tokens: int, instruction: Around | None) -> int:
        room = self._part.room(max_new_tokens, instruction)
        if room < LEAST_TOKENS:
            message = f"a part has room for {room} tokens, but should have at least {LEAST_TOKENS}"
            raise DocumentError("PromptTooLong", message, stage="prompt")
        return min(self._most_tokens or room, room)


def _entry(text: str, number: int, count: int) -> str:
    return f"Part {number} of {count}:\n{text.strip()}\n\n"


def _groupings(sizes: Sequence[int], room: int) -> Iterator[list[range]]:
    """Yield partitions of texts into even groups that fit into `room`, fewest groups first.

    At most half as many groups as texts (rounded up), so each round leaves fewer texts.
    """
    count = len(sizes)
    for num_groups in range(1, (count + 1) // 2 + 1):
        ends = [count * number // num_groups for number in range(num_groups + 1)]
        groups = [range(begin, end) for begin, end in pairwise(ends)]
        if all(sum(sizes[group.start : group.stop]) <= room for group in groups):
            yield groups
