"""Prompts for a document that is summarised in parts: one for each part, and those that merge their summaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompt, Prompts, PromptTooLongError
from specextend.data.splitting import TextSpan, split

LEAST_TOKENS = 64
"""Tokens of a part for which there must be room."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a document and its prompt."""

    span: TextSpan
    num_tokens: int
    prompt: Prompt


class ChunkPrompts:
    """The prompts of documents that do not fit into one, with the options of `prompts.chunks`."""

    def __init__(self, prompts: Prompts) -> None:
        self._options = prompts.chunks
        self._part = prompts.with_instruction(prompts.chunks.instruction)
        self._merge = prompts.with_instruction(prompts.chunks.merge_instruction)

    def check(self, max_new_tokens: int) -> None:
        """Raise ValueError if no document could be summarised in parts with summaries of `max_new_tokens`."""
        try:
            room = self._size(max_new_tokens, None)
            merge_room = self._merge_room(max_new_tokens, None)
        except DocumentError as error:
            raise ValueError(f"prompt.length_policy chunk: {error.message}") from error
        if 2 * self._options.overlap_tokens >= room:
            raise ValueError(f"chunks.overlap_tokens must be less than half of a part, which has {room} tokens")
        needed = 2 * (self.part_tokens(max_new_tokens) + self._entry_size(_entry("", 999, 999)))
        if needed > merge_room:
            raise ValueError(
                f"prompt.length_policy chunk: two summaries of parts may have {needed} tokens, but a prompt that "
                f"merges them has room for {merge_room}: lower chunks.max_new_tokens"
            )

    def part_tokens(self, max_new_tokens: int) -> int:
        """Return the most tokens of a part's summary. max_new_tokens: of the document's."""
        return self._options.max_new_tokens or max_new_tokens

    def parts(self, text: str, max_new_tokens: int, instruction: str | None) -> list[Part]:
        """Split a document and render its parts. max_new_tokens, instruction: of the document.

        What holds only white space has no prompt: it belongs to the part before it, at the beginning to the first one.
        Raises DocumentError (`PromptTooLong`) if there is no room for parts.
        """
        new = self.part_tokens(max_new_tokens)
        size = most = self._size(max_new_tokens, instruction)
        starts = self._part.token_starts(text)
        while True:
            spans = split(text, starts, size, min(self._options.overlap_tokens, (size - 1) // 2))
            pieces = [text[span.begin : span.end] for span in spans]
            counts = [len(self._part.encode_document(piece)) for piece in pieces]
            if max(counts) <= most:
                break
            size = min(size - 1, size * most // max(counts))  # cuts change tokens, and forged ones are spelled
            if size < 1:
                raise DocumentError("PromptTooLong", "a character of it has more tokens than fit", stage="prompt")
        written = [number for number, piece in enumerate(pieces) if piece.strip()]
        begins = [0, *(spans[number].begin for number in written[1:])]
        ends = [spans[following - 1].end for following in [*written[1:], len(spans)]]
        return [
            Part(TextSpan(begin, end), counts[number], self._part.render(pieces[number], new, instruction))
            for begin, end, number in zip(begins, ends, written, strict=True)
        ]

    def merges(self, texts: Sequence[str], max_new_tokens: int, instruction: str | None) -> list[Prompt]:
        """Render the prompts that merge texts in order, as few as hold them all; if one does, it is the last merge.

        Where a number of texts cannot be halved, one of them is alone in its prompt. max_new_tokens, instruction: of
        the document. Raises DocumentError (`PromptTooLong`) if two do not fit.
        """
        entries = [_entry(text, number, len(texts)) for number, text in enumerate(texts, 1)]
        sizes = [self._entry_size(entry) for entry in entries]
        room = self._merge_room(max_new_tokens, instruction)
        for groups in _groupings(sizes, room):
            new = max_new_tokens if len(groups) == 1 else self.part_tokens(max_new_tokens)
            joined = ["".join(entries[group.start : group.stop]).strip() for group in groups]
            try:
                return [self._merge.render(text, new, instruction) for text in joined]
            except PromptTooLongError:
                continue  # joined texts may have more tokens than they have alone
        message = f"two summaries of parts have up to {2 * max(sizes)} tokens, a merge has room for {room}"
        raise DocumentError("PromptTooLong", message, stage="prompt")

    def _merge_room(self, max_new_tokens: int, instruction: str | None) -> int:
        """Return the tokens of summaries that fit into any merge of a document."""
        return self._merge.room(max(max_new_tokens, self.part_tokens(max_new_tokens)), instruction)

    def _entry_size(self, entry: str) -> int:
        """Count the tokens of an entry, and one more at the joint with the next one."""
        return len(self._merge.encode_document(entry)) + 1

    def work(
        self, num_tokens: NDArray[np.int64], max_new_tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Estimate the prompt and output tokens of all requests for documents that do not fit. [N], [N].

        num_tokens: of the documents [N]. max_new_tokens: of their summaries [N].
        """
        new = np.full_like(max_new_tokens, self._options.max_new_tokens or 0)
        new = np.where(new > 0, new, max_new_tokens)
        limits, which = np.unique(max_new_tokens, return_inverse=True)
        sizes = np.array([self._usual_size(limit) for limit in limits.tolist()], np.int64)[which]
        overlap = np.minimum(self._options.overlap_tokens, (sizes - 1) // 2)
        num_parts = -(-np.maximum(1, num_tokens - overlap) // np.maximum(1, sizes - overlap))
        templates = num_parts * self._part.num_template_tokens + self._merge.num_template_tokens
        prompt_tokens = num_tokens + num_parts * (overlap + new) + templates
        return prompt_tokens, num_parts * new + max_new_tokens, num_parts + 1

    def _usual_size(self, max_new_tokens: int) -> int:
        try:
            return self._size(max_new_tokens, None)
        except DocumentError:
            return LEAST_TOKENS

    def _size(self, max_new_tokens: int, instruction: str | None) -> int:
        """Return the tokens of a part at most."""
        room = self._part.room(self.part_tokens(max_new_tokens), instruction)
        if room < LEAST_TOKENS:
            message = f"a part has room for {room} tokens, but should have at least {LEAST_TOKENS}"
            raise DocumentError("PromptTooLong", message, stage="prompt")
        return min(self._options.tokens or room, room)


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
