"""Documents that wait for a worker or are leased to one, and the limits after which either is given up. Pure.

A lease is one document handed to one worker, once. A document is charged an attempt when its lease ends in a way that
may be its fault; after `max_attempts` of these it is given up. Times are seconds of any monotonic clock that the caller
passes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specextend.cluster.places import Spot
from specextend.core import DocumentKey

MAX_UNCHARGED_EXPOSURES = 2
"""Deaths of workers that a document may sit through, not known to have started, before it runs alone."""
MAX_LOSSES = 10
"""Nodes that a document may lose before it is given up."""
PAUSE_S = 10.0
"""Seconds before a document that nobody could read is tried again, and before a worker that could not read a file gets
more of its documents."""
LENGTH_STEP = 1.1
"""Factor between two lengths that count as different; documents of about one length go in input order."""

Rank = tuple[int, DocumentKey]
"""A document with its place in the order of work; the smallest comes first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits after which a document is given up or a worker counts as hung."""

    max_attempts: int = 3
    """Charged attempts before a document becomes an error row."""
    max_losses: int = MAX_LOSSES
    """Leases lost with their node, which are not charged, before a document becomes an error row."""
    deadline_base_s: float = 600.0
    """Seconds that a document may take from the start of its prefill, whatever its length."""
    deadline_s_per_token: float = 1.0
    """Seconds more for each of its tokens."""
    stall_s: float = 600.0
    """Seconds without a step before a worker counts as hung."""

    def seconds_for(self, num_tokens: int) -> float:
        """Return the seconds that a document of so many tokens may take."""
        return self.deadline_base_s + self.deadline_s_per_token * num_tokens


@dataclass(frozen=True, slots=True)
class Lease:
    """One document handed to one worker, once."""

    lease_id: str
    key: DocumentKey
    num_tokens: int
    """Prompt and output, estimated."""
    attempt: int
    """1 for the first; what the row's `attempts` becomes."""
    is_alone: bool = False
    """True if the document may be at fault for a failure, so that nothing else runs beside it."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A document that becomes an error row."""

    key: DocumentKey
    attempts: int
    error_class: str
    message: str


@dataclass(frozen=True, slots=True)
class Tried:
    """The attempts of earlier starts of the run at a document."""

    attempts: int
    """All attempts that were charged."""
    struck: frozenset[Spot] = frozenset()
    """The places where they were charged."""
    forgiven: int = 0
    """Those of them that ended in an error row which is to be done again: they do not count towards `max_attempts`."""


@dataclass(slots=True)
class Item:
    """A document that is neither finished nor given up."""

    key: DocumentKey
    num_tokens: int
    attempts: int = 0
    forgiven: int = 0
    """Attempts that do not count towards `max_attempts`."""
    strikes: int = 0
    """Attempts that may have ended through its fault, and may have failed its neighbours."""
    struck: set[Spot] = field(default_factory=set)
    """The places where it was held when a worker or a batch failed, charged or not."""
    losses: int = 0
    exposures: int = 0

    @property
    def num_counted(self) -> int:
        """Count the attempts that count towards `max_attempts`."""
        return self.attempts - self.forgiven

    @property
    def is_memorable(self) -> bool:
        """Return True if it differs from a document that was never leased."""
        return bool(self.attempts or self.losses or self.exposures or self.struck)

    @property
    def runs_alone(self) -> bool:
        """Return True if its next failure may fail its neighbours, too."""
        return self.strikes > 0 or max(self.exposures, self.losses) >= MAX_UNCHARGED_EXPOSURES


@dataclass(slots=True)
class Held:
    """A lease in force."""

    lease: Lease
    item: Item
    worker: str
    started_at: float | None = None
    is_queued: bool = False
    """True once the worker has said that its prefill has not begun."""


def rank(num_tokens: int, key: DocumentKey) -> Rank:
    """Order a document: longest first, and those of about one length in input order."""
    return int(ranks(np.array([num_tokens]))[0]), key


def ranks(num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places [N] of lengths [N] in the order of work, equal for those of about one length."""
    return -np.round(np.log(np.maximum(1, num_tokens)) / math.log(LENGTH_STEP)).astype(np.int64)
