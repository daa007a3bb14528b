"""The earlier places of a text that match its end, kept up to date token by token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 12
"""Largest length of a match in tokens; a longer match counts as this long."""
MOST = 32
"""Largest number of matches that are returned."""


class Match(NamedTuple):
    """An earlier place whose last tokens are also the text's last. The best are the longest, then the latest."""

    length: int
    """Number of equal tokens, 1 to `LONGEST`."""
    position: int
    """Position of the token that followed there."""


class SuffixIndex:
    """A text and the matches of its end.

    A new token visits each of its earlier occurrences: a match ends there, one token longer than the match that ended
    one token before. So no search is needed.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """The text so far."""
        self._followers: defaultdict[int, list[int]] = defaultdict(list)  # token -> position behind each occurrence
        self._lengths: dict[int, int] = {}  # position behind a match -> length of the match

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append many tokens; only the last ones are matched, because the matches depend on nothing else."""
        unmatched = token_ids[:-LONGEST]
        if unmatched:
            self._lengths = {}
        for position, token_id in enumerate(unmatched, start=len(self.token_ids) + 1):
            self._followers[token_id].append(position)
        self.token_ids += unmatched
        for token_id in token_ids[-LONGEST:]:
            self.push(token_id)

    def push(self, token_id: int) -> None:
        """Append a token."""
        followers, length = self._followers[token_id], self._lengths.get
        self._lengths = {position: min(length(position - 1, 0) + 1, LONGEST) for position in followers}
        self.token_ids.append(token_id)
        followers.append(len(self.token_ids))

    def matches(self) -> list[Match]:
        """Return the `MOST` longest matches of the text's end, the best first."""
        best = sorted(zip(self._lengths.values(), self._lengths, strict=True), reverse=True)[:MOST]
        return [Match(length, position) for length, position in best]

    def continued(self, matches: Sequence[Match]) -> list[Match]:
        """Return the matches one token later if the text continues as they do, without those that reach its end."""
        end = len(self.token_ids)
        return [Match(min(length + 1, LONGEST), position + 1) for length, position in matches if position + 1 < end]
