"""The places where workers run, and which of them kill whatever works there. Pure.

A place is what a worker runs on: the accelerators of a node, or a seat on a node without accelerators. A death is
explained if the worker held documents over which workers have died elsewhere; otherwise the place may be at fault as
well. A place is trusted until it has an unexplained death. Then a document has to be finished there before it is
trusted again, unless no other place has fewer such deaths.
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
    """A name of a place under which the next start, on another Ray, finds it again."""

    host: str
    device: str


@dataclass(frozen=True, slots=True)
class Place:
    """A place, by Ray's id of its node and by its spot."""

    node: str
    """Ray's id of the node."""
    spot: Spot


@dataclass(frozen=True, slots=True)
class Coming:
    """The number of workers that are being built."""

    num_all: int = 0
    num_new: int = 0
    """Those that replace nobody, because the run has just begun or the cluster grows."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A time in which a worker gets no documents, and the reason."""

    seconds: float
    """Infinite if its place is left out."""
    num_deaths: int
    """Workers that died there in a row without explanation."""
    last_words: str
    """The reason of the last of these deaths."""


class Places:
    """The deaths at each place, and from them the places where a charged document may run next."""

    def __init__(self) -> None:
        self._deaths: Counter[Place] = Counter()
        """Deaths in a row, without a document done between."""
        self._unexplained: Counter[Place] = Counter()
        """Those of them that are not explained: documents that kill every worker make no broken machine."""
        self._last_words: dict[Place, str] = {}
        self._left_out: set[Place] = set()
        self._up: Counter[Place] = Counter()
        """Workers at each place, those included whose end is not settled yet."""
        self._coming = Coming()

    def expect(self, coming: Coming) -> None:
        """Note the workers that are being built: each may turn out to be at a place that is not known yet."""
        self._coming = coming

    def arrive(self, place: Place) -> Rest | None:
        """Note that a worker is ready at a place. Returns its rest if others have died there one after the other."""
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
        """Note that a worker is gone through no fault of its place."""
        self._up[place] -= 1

    def died(self, place: Place, last_words: str, *, is_explained: bool) -> None:
        """Note that a worker has died while its node lives on."""
        self._last_words[place] = last_words
        self._up[place] -= 1
        self._deaths[place] += 1
        self._unexplained[place] += not is_explained
        self._coming = Coming(self._coming.num_all + 1, self._coming.num_new)  # its successor

    def produced(self, place: Place) -> None:
        """Trust a place again: a document was done there."""
        del self._deaths[place], self._unexplained[place]

    @property
    def has_deaths(self) -> bool:
        """Return True if workers have died at any place since a document was last done there."""
        return bool(self._deaths)

    def num_deaths(self, place: Place) -> int:
        """Return the number of deaths there since a document was last done."""
        return self._deaths[place]

    def is_on_trial(self, place: Place) -> bool:
        """Return True after an unexplained death: its workers get one document at a time."""
        return self._unexplained[place] > 0

    def is_left_out(self, place: Place) -> bool:
        """Return True once too many workers have died there: its workers get no documents any more."""
        return place in self._left_out

    def is_trusted(self, place: Place) -> bool:
        """Return True if a death there says something about the document, because no other place is better."""
        return not self._unexplained[place] or not (self._coming.num_all or self._has_better(place))

    def for_retry(self, struck: Collection[Spot], seeing: Collection[Place]) -> set[Place]:
        """Choose the places where a document may run next that was charged somewhere.

        Places on other hosts come first. If no new host can come up, other places on the same hosts may be chosen, and
        if no other place can come up, those where it was charged. Of the allowed places, those with the fewest deaths
        are chosen. struck: where it was charged. seeing: places with a worker that can read it.
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
        """Return True if another place that has a worker has fewer unexplained deaths."""
        others = {other for other, num in self._up.items() if num > 0} - {place} - self._left_out
        return any(self._unexplained[other] < self._unexplained[place] for other in others)
