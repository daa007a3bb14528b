"""A document that is too long for one prompt: split where sections, paragraphs or sentences end, and merged again."""

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
"""Tokens of a part for which there must be room."""
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


def split(text: str, starts: Sequence[int] | Ints, most: int) -> list[TextSpan]:
    """Split a text into parts of at most `most` tokens, all about as long; together they are the whole text.

    Only a part of one character may have more of them. starts: the character at which each of its tokens starts,
    rising.
    """
    starts = np.asarray(starts, np.int64)
    places = np.append(starts, len(text))
    spans: list[TextSpan] = []
    begin = first = 0
    while (left := len(starts) - first) > most:
        share = math.ceil(left / math.ceil(left / most))
        least, wanted, last = (
            places[min(first + count, len(starts))] for count in (max(1, int(_LEAST_SHARE * share)), share, most)
        )
        end = max(_best_cut(text, int(least), int(wanted), int(last)), begin + 1)  # a character may have many tokens
        spans.append(TextSpan(begin, end))
        begin, first = end, int(starts.searchsorted(end))
    is_over = bool(spans) and begin == len(text)
    return spans if is_over else [*spans, TextSpan(begin, len(text))]


def _best_cut(text: str, least: int, wanted: int, last: int) -> int:
    """Find the best place to cut behind character `least`, up to `last`, and as near to `wanted` as it may be."""
    for pattern in _BREAKS:
        places = [found.end() for found in pattern.finditer(text, least, last) if least < found.end() <= last]
        if places:
            return min(places, key=lambda place: abs(place - wanted))
    return wanted


class Part(NamedTuple):
    """A part of a document and its prompt."""

    span: TextSpan
    prompt: Prompt


class PartPrompts:
    """The prompts of documents that do not fit into one: for each part, and for merges of the parts' summaries."""

    def __init__(self, prompts: Prompts):
        """Take the prompts of the run, whose `parts` are the options."""
        options, task = prompts.parts, prompts.options.instruction
        self._most_tokens = options.tokens
        self._part = prompts.with_instruction(options.instruction or task)
        self._merge = prompts.with_instruction(options.merge_instruction or task)

    def check(self, max_new_tokens: int, *, merges: bool = True) -> None:
        """Raise ValueError if no document could be summarised in parts with summaries of `max_new_tokens`.

        merges: the model merges them.
        """
        try:
            self._size(max_new_tokens, None)
            room = self._merge.room(max_new_tokens)
        except DocumentError as error:
            raise ValueError(f"prompt.length_policy parts: {error.message}") from error
        needed = 2 * (max_new_tokens + self._entry_size(_entry("", 999, 999)))
        if merges and needed > room:
            raise ValueError(
                f"prompt.length_policy parts: two summaries of parts may have {needed} tokens, but a prompt that "
                f"merges them has room for {room}: lower decoding.max_new_tokens"
            )

    def parts(self, text: str, max_new_tokens: int, instruction: Around | None) -> list[Part]:
        """Split a document and render its parts. max_new_tokens, instruction: of the document.

        What holds only white space has no prompt: it belongs to the part before it, at the beginning to the first one.
        Raises DocumentError (`PromptTooLong`) if there is no room for parts.
        """
        size = self._size(max_new_tokens, instruction)
        starts = self._part.token_starts(text)
        while size > 0:
            try:
                return self._rendered(text, split(text, starts, size), max_new_tokens, instruction)
            except PromptTooLongError:
                size -= 1 + size // 64  # cuts change tokens
        raise DocumentError("PromptTooLong", "a character of it has more tokens than fit", stage="prompt")

    def _rendered(
        self, text: str, spans: Sequence[TextSpan], max_new_tokens: int, instruction: Around | None
    ) -> list[Part]:
        pieces = [text[span.begin : span.end] for span in spans]
        written = [number for number, piece in enumerate(pieces) if piece.strip()]
        begins = [0, *(spans[number].begin for number in written[1:])]
        ends = [spans[following - 1].end for following in [*written[1:], len(spans)]]
        return [
            Part(TextSpan(begin, end), self._part.render(pieces[number], max_new_tokens, instruction))
            for begin, end, number in zip(begins, ends, written, strict=True)
        ]

    def merges(self, texts: Sequence[str], max_new_tokens: int, instruction: Around | None) -> list[Prompt]:
        """Render the prompts that merge texts in order, as few as hold them all; if one does, it is the last merge.

        Where a number of texts cannot be halved, one of them is alone in its prompt. max_new_tokens, instruction: of
        the document. Raises DocumentError (`PromptTooLong`) if two do not fit.
        """
        entries = [_entry(text, number, len(texts)) for number, text in enumerate(texts, 1)]
        sizes = [self._entry_size(entry) for entry in entries]
        room = self._merge.room(max_new_tokens, instruction)
        for groups in _groupings(sizes, room):
            joined = ["".join(entries[group.start : group.stop]).strip() for group in groups]
            try:
                return [self._merge.render(text, max_new_tokens, instruction) for text in joined]
            except PromptTooLongError:
                continue  # joined texts may have more tokens than they have alone
        message = f"two summaries of parts have up to {2 * max(sizes)} tokens, a merge has room for {room}"
        raise DocumentError("PromptTooLong", message, stage="prompt")

    def work(self, num_tokens: Ints, max_new_tokens: Ints) -> tuple[Ints, Ints]:
        """Estimate the prompt and output tokens of all requests for documents that do not fit.

        num_tokens: of the documents [N]. max_new_tokens: of their summaries [N]. Returns two arrays [N].
        """
        limits, which = np.unique(max_new_tokens, return_inverse=True)
        sizes = np.array([self._usual_size(limit) for limit in limits.tolist()], np.int64)[which]
        num_parts = -(-np.maximum(1, num_tokens) // sizes)
        templates = num_parts * self._part.num_template_tokens + self._merge.num_template_tokens
        outputs = num_parts * max_new_tokens
        return num_tokens + outputs + templates, outputs + max_new_tokens

    def _entry_size(self, entry: str) -> int:
        """Count the tokens of an entry, and one more at the joint with the next one."""
        return len(self._merge.encode_document(entry)) + 1

    def _usual_size(self, max_new_tokens: int) -> int:
        try:
            return self._size(max_new_tokens, None)
        except DocumentError:
            return LEAST_TOKENS

    def _size(self, max_new_tokens: int, instruction: Around | None) -> int:
        """Return the tokens of a part at most."""
        room = self._part.room(max_new_tokens, instruction)
        if room < LEAST_TOKENS:
            message = f"a part has room for {room} tokens, but should have at least {LEAST_TOKENS}"
            raise DocumentError("PromptTooLong", message, stage="prompt")
        return min(self._most_tokens or room, room)


def _entry(text: str, number: int, count: int) -> str:
    """Return the summary of a part as it stands in a merge."""
    return f"Part {number} of {count}:\n{text.strip()}\n\n"


def _groupings(sizes: Sequence[int], room: int) -> Iterator[list[range]]:
    """Yield ways to cut texts of some sizes into groups that fit, with about as many each; the fewest groups first.

    There are at most half as many groups as texts, rounded up, so that each round of merges leaves fewer texts.
    """
    count = len(sizes)
    for num_groups in range(1, (count + 1) // 2 + 1):
        ends = [count * number // num_groups for number in range(num_groups + 1)]
        groups = [range(begin, end) for begin, end in pairwise(ends)]
        if all(sum(sizes[group.start : group.stop]) <= room for group in groups):
            yield groups
