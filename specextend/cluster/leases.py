"""Leases: the documents and workers that they join, the places where they run, and their limits. Pure.

A lease is one document handed to one worker, once. A document is charged an attempt when its lease ends in a way that
may be its fault; after `max_attempts` of these it is given up. Times are seconds of any monotonic clock that the caller
passes in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from specextend.core import DocumentKey

MAX_LOSSES = 10
"""Nodes that a document may lose before it is given up."""

MAX_EXPOSURES = 2
"""Deaths of workers that a document may sit through, not known to have started, before it runs alone."""


class Spot(NamedTuple):
    """A name of a place under which the next start, on another Ray, finds it again."""

    host: str
    device: str


@dataclass(frozen=True, slots=True)
class Place:
    """A place that a worker runs on: the accelerators of a node, or a seat on a node without accelerators."""

    node: str
    """Ray's id of the node."""
    spot: Spot


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits after which a document is given up or a worker counts as hung."""

    max_attempts: int = 3
    """Charged attempts before a document becomes an error row."""
    max_losses: int = MAX_LOSSES
    """Leases lost with their node, which are not charged, before a document becomes an error row."""
    deadline_s: float = 600.0
    """Seconds that a document may take from the start of its prefill, and as much again for each 1,000 tokens."""
    stall_s: float = 600.0
    """Seconds without a step before a worker counts as hung."""

    def seconds_for(self, num_tokens: int) -> float:
        """Return the seconds that a document of so many tokens may take."""
        return self.deadline_s * (1 + num_tokens / 1000)


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
class OpenDocument:
    """A document that is leased, or of which there is something to remember."""

    key: DocumentKey
    num_tokens: int
    attempts: int = 0
    forgiven: int = 0
    """Attempts that do not count towards `max_attempts`."""
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
        return bool(self.struck) or max(self.exposures, self.losses) >= MAX_EXPOSURES


@dataclass(slots=True)
class HeldLease:
    """A lease in force."""

    lease: Lease
    document: OpenDocument
    worker: str
    started_at: float | None = None
    is_queued: bool = False
    """True once the worker has said that its prefill has not begun."""


@dataclass(slots=True)
class Holder:
    """A worker and the leases that it holds."""

    place: Place
    number: int
    """In the order in which workers joined."""
    moved_at: float
    leases: dict[str, HeldLease] = field(default_factory=dict)
    num_closing: int = 0
    """Leases taken back whose call has not returned yet."""
    num_steps: int = -1
    hangs_at: int | None = None
    """The step counter when a document passed its deadline: until it moves, the engine may still hang in that one."""
    rests_until: float = -math.inf
    is_alone: bool = False
    """True while it holds one document that runs alone."""
    is_gone: bool = False
    is_draining: bool = False
    """True once its node is about to go."""

    @property
    def is_empty(self) -> bool:
        """Return True if it holds no lease, not even one that is being taken back."""
        return not self.leases and not self.num_closing

    @property
    def num_taken(self) -> int:
        """Count its leases, those being taken back included."""
        return len(self.leases) + self.num_closing

    @property
    def holds_struck(self) -> bool:
        """Return True if every document that it holds was struck elsewhere, too: that explains its death."""
        return bool(self.leases) and all(held.document.struck - {self.place.spot} for held in self.leases.values())

    def longest_queued(self) -> Lease | None:
        """Return the longest of its leases that wait behind another document; None if there is none."""
        if len(self.leases) + (self.hangs_at is not None) < 2:
            return None
        queued = [held.lease for held in self.leases.values() if held.is_queued]
        return max(queued, key=lambda lease: lease.num_tokens, default=None)
