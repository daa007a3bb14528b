"""Where workers run, and which of these places kills whatever works there. Pure.

A death is explained where the worker held documents over which workers have died elsewhere; otherwise the place may be
at fault as well. A place is trusted until it has an unexplained death; then it has to finish a document before it is
trusted again, unless no other place has fewer of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

MAX_DEATHS = 6
"""Unexplained deaths at one place in a row, without a document done between, before it is left out."""
FIRST_REST_S = 10.0
"""Seconds that the third worker at such a place waits for documents; the next ones wait twice as long each."""


class Spot(NamedTuple):
    """Names a place so that the next start, on another Ray, finds it again."""

    host: str
    device: str


@dataclass(frozen=True, slots=True)
class Place:
    """Names what a worker runs on: the accelerators of a node, or its seat on one without accelerators."""

    node: str
    """Ray's id."""
    spot: Spot


@dataclass(frozen=True, slots=True)
class Coming:
    """Counts the workers that are being built."""

    num_all: int = 0
    num_new: int = 0
    """Those that replace nobody: a run that has just begun, or a cluster that grows."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Says for how long, and why, a worker takes no documents."""

    seconds: float
    """Infinite where its place is left out."""
    num_deaths: int
    """Workers that died there in a row without explanation."""
    last_words: str
    """What the last of them died of."""


class Places:
    """Counts deaths by place, and says where a charged document may run next."""

    def __init__(self) -> None:
        self._deaths: Counter[Place] = Counter()
        """In a row, without a document done between."""
        self._unexplained: Counter[Place] = Counter()
        """Of these, those that are not explained: a corpus full of poison is no broken machine."""
        self._last_words: dict[Place, str] = {}
        self._left_out: set[Place] = set()
        self._up: Counter[Place] = Counter()
        """Workers at each, those among them that are gone and not buried yet."""
        self._coming = Coming()

    def expect(self, coming: Coming) -> None:
        """Note the workers that are being built: each may turn out to be at a place that is not known yet."""
        self._coming = coming

    def arrive(self, place: Place) -> Rest | None:
        """Note that a worker is ready at a place. Returns its rest where others have died one after the other."""
        self._up[place] += 1
        self._coming = Coming(max(0, self._coming.num_all - 1), max(0, self._coming.num_new - 1))
        num_deaths = self._unexplained[place]
        if num_deaths >= MAX_DEATHS and self._has_better(place):
            self._left_out.add(place)
        if place in self._left_out:
            return Rest(math.inf, num_deaths, self._last_words[place])
        if num_deaths < 2 or self.is_trusted(place):
            return None
        return Rest(FIRST_REST_S * 2.0 ** (num_deaths - 2), num_deaths, self._last_words[place])

    def depart(self, place: Place) -> None:
        """Note that a worker is gone, and nothing is known against its place."""
        self._up[place] -= 1

    def died(self, place: Place, last_words: str, *, is_explained: bool) -> None:
        """Note that a worker has died, and not with its node."""
        self._last_words[place] = last_words
        self._up[place] -= 1
        self._deaths[place] += 1
        self._unexplained[place] += not is_explained
        self._coming = Coming(self._coming.num_all + 1, self._coming.num_new)  # its successor

    def produced(self, place: Place) -> None:
        """Trust a place again: a document was done there."""
        del self._deaths[place], self._unexplained[place]

    def num_deaths(self, place: Place) -> int:
        """Count the deaths there since a document was last done."""
        return self._deaths[place]

    def is_on_trial(self, place: Place) -> bool:
        """Return True after an unexplained death: its workers get one document at a time."""
        return self._unexplained[place] > 0

    def is_left_out(self, place: Place) -> bool:
        """Return True once too many workers have died there: whoever is there gets no documents any more."""
        return place in self._left_out

    def is_trusted(self, place: Place) -> bool:
        """Return True where a death says something about the document: no other place is better."""
        return not self._unexplained[place] or not (self._coming.num_all or self._has_better(place))

    def for_retry(self, struck: Collection[Spot], seeing: Collection[Place]) -> set[Place]:
        """Choose the places where a document may run that was charged at others.

        Places on other hosts come first, then other places, if no host can come up, and those where it was charged only
        if no other place can come up. Of these, the ones with the fewest deaths.

        struck: where it was charged. seeing: places with a worker that can read it.
        """
        known = [place for place in seeing if place not in self._left_out]
        hosts = {spot.host for spot in struck}
        allowed = [place for place in known if place.spot.host not in hosts]
        if not allowed and not self._coming.num_new:
            allowed = [place for place in known if place.spot not in struck]
        if not allowed and not self._coming.num_all:
            allowed = known
        fewest = min((self._deaths[place] for place in allowed), default=0)
        return {place for place in allowed if self._deaths[place] == fewest}

    def _has_better(self, place: Place) -> bool:
        """Return True where another place that has a worker has fewer unexplained deaths behind it."""
        others = {other for other, num in self._up.items() if num > 0} - {place} - self._left_out
        return any(self._unexplained[other] < self._unexplained[place] for other in others)
