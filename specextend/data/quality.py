"""What can be said of a summary without reading it."""

from __future__ import annotations

from specextend.core import Completion

_MIN_REPEATS = 4
_MIN_LOOP_TOKENS = 24
_MAX_PERIOD = 64


def quality_flags(completion: Completion) -> list[str]:
    """`empty`: no text; `truncated`: cut at `max_new_tokens`; `repeated`: the text ends in a loop."""
    flags = {
        "empty": not completion.text.strip(),
        "truncated": completion.finish_reason == "length",
        "repeated": ends_in_loop(completion.token_ids),
    }
    return [name for name, raised in flags.items() if raised]


def ends_in_loop(token_ids: list[int]) -> bool:
    """Whether the tokens end in the same stretch at least four times over, 24 tokens or more in all.

    A final EOS does not hide the loop.
    """
    return _loops(token_ids) or _loops(token_ids[:-1])


def _loops(token_ids: list[int]) -> bool:
    return any(
        _tail_repeats(token_ids, period, max(_MIN_REPEATS * period, _MIN_LOOP_TOKENS))
        for period in range(1, _MAX_PERIOD + 1)
    )


def _tail_repeats(token_ids: list[int], period: int, length: int) -> bool:
    """Whether each of the last `length` tokens equals the one `period` before it, as far as both are among them."""
    tail = token_ids[-length:]
    return len(tail) == length and tail[period:] == tail[:-period]
