"""Leases, the places where they run, and the limits after which a document is given up. Pure.

A lease is one document handed to one worker, once. A document is charged an attempt when its lease ends in a way that
may be its fault; after `max_attempts` of these it is given up. Times are seconds of any monotonic clock that the caller
passes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specextend.core import DocumentKey

MAX_LOSSES = 10
"""Nodes that a document may lose before it is given up."""


class Spot(NamedTuple):
    """A name of a place under which the next start, on another Ray, finds it again."""

    host: str
    device: str


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker runs on: the accelerators of a node, or a seat on a node without accelerators."""

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
