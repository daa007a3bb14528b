"""Documents that wait for a worker or are leased to one, and the limits after which either is given up. Pure.

A lease is one document handed to one worker, once. A document is charged an attempt when its lease ends in a way that
may be its fault; after `max_attempts` of these it is given up. Times are seconds of any monotonic clock that the caller
passes in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from specextend.cluster.places import Place, Spot
from specextend.core import DocumentKey

MAX_UNCHARGED_EXPOSURES = 2
"""Deaths of workers that a document may sit through, not known to have started, before it runs alone."""
MAX_LOSSES = 10
"""Nodes that a document may lose before it is given up."""
PAUSE_S = 10.0
"""Seconds before a document that nobody could read is tried again, and before a worker that could not read a file gets
more of its documents."""
LONGEST_PAUSE_S = 600.0
"""Longest pause of such a worker: it doubles as long as the worker reads nothing of that file."""
MAX_UNREAD_FILES = 1
"""Files that a worker may fail to read in a row before it gets no documents at all."""
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
    num_leases: int = 0

    @property
    def num_counted(self) -> int:
        """Count the attempts that count towards `max_attempts`."""
        return self.attempts - self.forgiven

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


@dataclass(slots=True)
class Pause:
    """Back-off that doubles up to ten minutes."""

    until: float = -math.inf
    next_s: float = PAUSE_S

    def begin(self, now: float) -> float:
        """Begin a pause unless one is under way. Returns the seconds until its end."""
        if self.until <= now:
            self.until = now + self.next_s
            self.next_s = min(2 * self.next_s, LONGEST_PAUSE_S)
        return self.until - now


@dataclass(slots=True)
class Holder:
    """A worker and the leases that it holds."""

    place: Place
    rests_until: float = -math.inf
    leases: dict[str, Held] = field(default_factory=dict)
    alone: bool = False
    """True while it holds one document that runs alone."""
    is_reserved: bool = False
    """True while it gets no more documents, because one that runs alone waits for it to run empty."""
    takes_leases: bool = True
    is_trusted: bool = True
    """True if its death says something about its documents; settled once it takes no leases any more."""
    num_closing: int = 0
    """Leases taken back whose call has not returned yet."""
    expired_at_step: int | None = None
    """The step counter when a lease was last taken back: until it moves, the engine may still hang in that one."""
    num_steps: int = -1
    moved_at: float = 0.0
    blind: dict[int | None, Pause] = field(default_factory=dict)
    """Files that it could not read; None: any."""
    unread_files: set[int] = field(default_factory=set)
    """Those of them that it could not read since it last read something."""

    def blind_to(self, now: float) -> set[int | None]:
        """Select the files of which it gets no documents now."""
        return {file for file, pause in self.blind.items() if pause.until > now}

    def sees(self, file: int, now: float) -> bool:
        """Return True if it may get a document of a file."""
        return self.blind_to(now).isdisjoint((file, None))

    def has_read(self, file: int) -> None:
        """Note that it has read a document of a file."""
        if self.blind:
            self.unread_files.clear()
            self.blind.pop(file, None)
            self.blind.pop(None, None)

    def could_not_read(self, file: int, now: float) -> float:
        """Note that it could not read a file. Returns the seconds until it gets documents of that file again."""
        self.unread_files.add(file)
        lost: list[int | None] = [file]
        if len(self.unread_files) > MAX_UNREAD_FILES:
            lost.append(None)
        return max(self.blind.setdefault(each, Pause()).begin(now) for each in lost)

    @property
    def is_empty(self) -> bool:
        """Return True if it holds no lease, not even one that is being taken back."""
        return not self.leases and not self.num_closing

    @property
    def may_hang(self) -> bool:
        """Return True if it may still be busy with a lease that was taken back."""
        return self.expired_at_step is not None and self.expired_at_step == self.num_steps

    @property
    def holds_struck(self) -> bool:
        """Return True if every document that it holds was struck elsewhere, too: that explains its death."""
        return bool(self.leases) and all(held.item.struck - {self.place.spot} for held in self.leases.values())

    @property
    def num_taken(self) -> int:
        """Count its leases, those being taken back included."""
        return len(self.leases) + self.num_closing

    @property
    def num_before(self) -> int:
        """Count the documents that keep it busy or wait for it."""
        return len(self.leases) + self.may_hang

    def queued(self) -> Held | None:
        """Return the longest of its leases whose prefill has not begun."""
        waiting = [held for held in self.leases.values() if held.is_queued]
        return max(waiting, key=lambda held: held.lease.num_tokens, default=None)


def nearest_to_empty(workers: Mapping[str, Holder], file: int, now: float) -> str | None:
    """Choose the worker that can read a file and seems to run empty first; it stays the same one until it is empty."""

    def order(name: str) -> tuple[bool, bool, int]:
        worker = workers[name]
        return not worker.is_empty, not worker.is_reserved, worker.num_taken

    free = (name for name, worker in workers.items() if not worker.alone and worker.sees(file, now))
    return min(free, key=order, default=None)


class Waiting:
    """Documents that wait for a worker, longest first; a worker may have to leave some files to others.

    Each file has a queue, and the first documents of all files are in one more queue.
    """

    def __init__(self) -> None:
        self._files: dict[int, list[Rank]] = {}
        self._firsts: list[Rank] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, key: DocumentKey, num_tokens: int) -> None:
        """Add a document."""
        entry, queue = rank(num_tokens, key), self._files.setdefault(key.file, [])
        heapq.heappush(queue, entry)
        if queue[0] == entry:
            heapq.heappush(self._firsts, entry)
        self._size += 1

    def take(self, but_of: Collection[int | None] = ()) -> DocumentKey | None:
        """Remove and return the first document that is not of the files `but_of`; None if there is none."""
        passed, found = [], None
        while self._firsts and found is None:
            entry = heapq.heappop(self._firsts)
            queue = self._files[entry[1].file]
            if not queue or queue[0] != entry:  # another one has come before it, and stands for its file
                continue
            if entry[1].file in but_of:
                passed.append(entry)
            else:
                found = heapq.heappop(queue)[1]
                self._size -= 1
                if queue:
                    heapq.heappush(self._firsts, queue[0])
        for entry in passed:
            heapq.heappush(self._firsts, entry)
        return found

    def keys(self) -> list[DocumentKey]:
        """List all documents in their order."""
        return [key for _, key in sorted(entry for queue in self._files.values() for entry in queue)]


def rank(num_tokens: int, key: DocumentKey) -> Rank:
    """Order a document: longest first, and those of about one length in input order.

    Input order matters because a worker reads whole row groups: if the rows of one were asked for over the whole run,
    the group would be read once for every row.
    """
    return -round(math.log(max(1, num_tokens), LENGTH_STEP)), key
