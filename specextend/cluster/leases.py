"""What a document stands at, what a worker holds, and when either has had enough. Pure.

Times are seconds of any monotonic clock that the caller passes in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specextend.cluster.places import Place, Spot
from specextend.core import DocumentKey

MAX_UNCHARGED_EXPOSURES = 2
"""Deaths a document may sit through, not known to have started, before it runs alone."""
MAX_LOSSES = 10
"""Nodes a document may lose before it is given up."""
PAUSE_S = 10.0
"""Seconds before a document that nobody could read is tried again, and before a worker that could not gets more of its
file."""
LONGEST_PAUSE_S = 600.0
"""Of such a worker, whose pause doubles as long as it reads nothing of that file."""
MAX_UNREAD_FILES = 1
"""Files of which a worker may fail to read in a row before it gets nothing of any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a document or a worker has had enough."""

    max_attempts: int = 3
    """Charged attempts before a document becomes an error row."""
    max_losses: int = MAX_LOSSES
    """Uncharged ones, lost with their node."""
    deadline_base_s: float = 600.0
    """Seconds a document may take from the start of its prefill, whatever its length."""
    deadline_s_per_token: float = 1.0
    """Seconds more for each of its tokens."""
    stall_s: float = 600.0
    """Seconds without a step before a worker counts as hung."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One document handed to one worker, once."""

    lease_id: str
    key: DocumentKey
    num_tokens: int
    """Prompt and output, estimated."""
    attempt: int
    """1 for the first; what the row's `attempts` becomes."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A document that becomes an error row."""

    key: DocumentKey
    attempts: int
    error_class: str
    message: str


@dataclass(frozen=True, slots=True)
class Tried:
    """Says how often earlier starts of the run have tried a document."""

    attempts: int
    """All that were charged."""
    struck: frozenset[Spot] = frozenset()
    """Where."""
    forgiven: int = 0
    """Those of them that ended in an error row which is to be done again: they do not count towards `max_attempts`."""


@dataclass(slots=True)
class Item:
    """A document's standing."""

    key: DocumentKey
    num_tokens: int
    attempts: int = 0
    forgiven: int = 0
    """Attempts that do not count towards `max_attempts`."""
    strikes: int = 0
    """Attempts that may have ended by its fault, and taken neighbours along."""
    struck: set[Spot] = field(default_factory=set)
    """Where it was held when something ended that way, charged or not."""
    losses: int = 0
    exposures: int = 0
    num_leases: int = 0

    @property
    def num_counted(self) -> int:
        """Attempts that count towards `max_attempts`."""
        return self.attempts - self.forgiven

    @property
    def runs_alone(self) -> bool:
        """Whether it may take neighbours with it."""
        return self.strikes > 0 or max(self.exposures, self.losses) >= MAX_UNCHARGED_EXPOSURES


@dataclass(slots=True)
class Held:
    """A lease in force."""

    lease: Lease
    item: Item
    worker: str
    started_at: float | None = None
    is_queued: bool = False
    """Whether the worker has said that its prefill has not begun."""


@dataclass(slots=True)
class Pause:
    """A growing one."""

    until: float = -math.inf
    next_s: float = PAUSE_S

    def begin(self, now: float) -> float:
        """Begin it, if it is not under way; the seconds until its end."""
        if self.until <= now:
            self.until = now + self.next_s
            self.next_s = min(2 * self.next_s, LONGEST_PAUSE_S)
        return self.until - now


@dataclass(slots=True)
class Holder:
    """What a worker holds."""

    place: Place
    rests_until: float = -math.inf
    leases: dict[str, Held] = field(default_factory=dict)
    alone: bool = False
    is_reserved: bool = False
    """Kept from filling up again: a document waits for it to run empty."""
    takes_leases: bool = True
    is_trusted: bool = True
    """Whether its death says something about its documents; known once it takes no leases any more."""
    num_closing: int = 0
    """Leases taken back whose call has not returned yet."""
    expired_at_step: int | None = None
    """The step counter when a lease was last taken back: until it moves, the engine may still hang in that one."""
    num_steps: int = -1
    moved_at: float = 0.0
    blind: dict[int | None, Pause] = field(default_factory=dict)
    """Files that it could not read; None: any."""
    unread_files: set[int] = field(default_factory=set)
    """Of those, the ones since it last read something."""

    def blind_to(self, now: float) -> set[int | None]:
        """Files that it gets nothing of now."""
        return {file for file, pause in self.blind.items() if pause.until > now}

    def sees(self, file: int, now: float) -> bool:
        """Whether it may get a document of a file."""
        return self.blind_to(now).isdisjoint((file, None))

    def has_read(self, file: int) -> None:
        """It has read something."""
        if self.blind:
            self.unread_files.clear()
            self.blind.pop(file, None)
            self.blind.pop(None, None)

    def could_not_read(self, file: int, now: float) -> float:
        """Seconds until it gets something of that file again."""
        self.unread_files.add(file)
        lost: list[int | None] = [file]
        if len(self.unread_files) > MAX_UNREAD_FILES:
            lost.append(None)
        return max(self.blind.setdefault(each, Pause()).begin(now) for each in lost)

    @property
    def is_empty(self) -> bool:
        """No lease, not even one being taken back."""
        return not self.leases and not self.num_closing

    @property
    def may_hang(self) -> bool:
        """Whether it may still be busy with a lease that was taken back from it."""
        return self.expired_at_step is not None and self.expired_at_step == self.num_steps

    @property
    def holds_struck(self) -> bool:
        """Return True where all that it holds was struck elsewhere, too: that explains its death."""
        return bool(self.leases) and all(held.item.struck - {self.place.spot} for held in self.leases.values())

    @property
    def num_taken(self) -> int:
        """Leases, with those being taken back."""
        return len(self.leases) + self.num_closing

    @property
    def num_before(self) -> int:
        """Documents that keep it busy or wait for it."""
        return len(self.leases) + self.may_hang

    def queued(self) -> Held | None:
        """The longest of its leases that wait."""
        waiting = [held for held in self.leases.values() if held.is_queued]
        return max(waiting, key=lambda held: held.lease.num_tokens, default=None)


def nearest_to_empty(workers: Mapping[str, Holder], file: int, now: float) -> str | None:
    """Choose the worker that can read a file and seems to run empty first; it stays the same one until it is empty."""

    def order(name: str) -> tuple[bool, bool, int]:
        worker = workers[name]
        return not worker.is_empty, not worker.is_reserved, worker.num_taken

    free = (name for name, worker in workers.items() if not worker.alone and worker.sees(file, now))
    return min(free, key=order, default=None)
