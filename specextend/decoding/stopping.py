"""The end of a sequence: its EOS, the token that completes a stop string or a loop, or its full length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specextend.core import FinishReason

MIN_REPEATS = 4
"""Times that a stretch of tokens must stand in a row to be a loop."""
MAX_PERIOD = 64
"""Tokens of the longest stretch that is looked for."""
MIN_STOP_TOKENS = 64
"""Tokens that a loop must cover to end an output. A line of a table with one entry over and over has covered 40."""

MIN_FLAGGED_TOKENS = 24
"""Tokens that a loop must cover to count as one where that costs no text."""

_BROKEN = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet one
_LONGEST_CHARACTER = 4  # bytes, each of which can be a token


class StopChecker:
    """Consumes the tokens of one sequence as they are decided, and says when it ends.

    Only if there are stop strings, text is decoded before the end: with each token the last few, which are enough to
    hold any of them. The text of the first of these may be another than in the whole, so a find is confirmed there.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        stop: tuple[str, ...],
        max_new_tokens: int,
        *,
        stop_repetition: bool = False,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._stop = stop
        self._max_new_tokens = max_new_tokens
        self._stop_repetition = stop_repetition
        added = tokenizer.added_tokens_decoder.items() if stop else ()
        self._special = {token_id for token_id, token in added if token.special}
        self._recent: list[int] = []  # the last tokens, without special ones
        self._num_recent = _LONGEST_CHARACTER * (2 + max(map(len, stop), default=0))

    def push(self, token_ids: Iterable[int]) -> FinishReason | None:
        """Append the next tokens up to the sequence's end; return why it ends, if it does."""
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token_id)
            if token_id in self._eos_token_ids or self._completes_stop(token_id):
                self.finish_reason = "stop"
            elif self._stop_repetition and ends_in_loop(self.token_ids, MIN_STOP_TOKENS):
                self.finish_reason = "repetition"
            elif len(self.token_ids) >= self._max_new_tokens:
                self.finish_reason = "length"
        return self.finish_reason

    @property
    def text(self) -> str:
        """Return the text so far, without special tokens, the EOS and the stop string."""
        ends_with_eos = bool(self.token_ids) and self.token_ids[-1] in self._eos_token_ids
        text = _decode(self._tokenizer, self.token_ids[:-1] if ends_with_eos else self.token_ids)
        if self.finish_reason != "stop" or ends_with_eos:
            return text
        return text[: _find(text, self._stop)]

    def _completes_stop(self, token_id: int) -> bool:
        """Return True if the last token completes a stop string."""
        if not self._stop or token_id in self._special:
            return False
        self._recent = [*self._recent[-self._num_recent :], token_id]
        recent = _decode(self._tokenizer, self._recent).rstrip(_BROKEN)
        if _find(recent, self._stop) is None:
            return False
        return _find(_decode(self._tokenizer, self.token_ids), self._stop) is not None


def ends_in_loop(token_ids: list[int], min_tokens: int) -> bool:
    """Return True if a stretch of up to MAX_PERIOD tokens, MIN_REPEATS times or more in a row, is the end.

    min_tokens: how many tokens the repeats must cover at least.
    """
    if len(token_ids) < min_tokens:
        return False
    last = token_ids[-1]
    longest = min(MAX_PERIOD, len(token_ids) // MIN_REPEATS)
    periods = [period for period in range(1, longest + 1) if token_ids[-1 - period] == last]
    return any(_tail_repeats(token_ids, period, max(MIN_REPEATS * period, min_tokens)) for period in periods)


def is_loop(token_ids: list[int]) -> bool:
    """Return True if the end of a whole output is a loop; a final EOS does not hide it."""
    return any(ends_in_loop(tokens, MIN_FLAGGED_TOKENS) for tokens in (token_ids, token_ids[:-1]))


def _tail_repeats(token_ids: list[int], period: int, length: int) -> bool:
    """Return True if each of the last `length` tokens equals the one `period` before it, if that is among them too."""
    tail = token_ids[-length:]
    return tail[period:] == tail[:-period]


def _find(text: str, stop: tuple[str, ...]) -> int | None:
    """Return where the earliest stop string begins; None without one."""
    return min((start for string in stop if (start := text.find(string)) >= 0), default=None)


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Decode `token_ids` as they are, without special tokens."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
