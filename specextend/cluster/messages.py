"""Leases, the messages between the driver and its workers, which can be pickled, and the events of
workers. Pure.

A lease is one document handed to one worker, once. A document is charged an attempt when its lease
ends in a way that may be its fault; after `job.max_attempts` of these it is given up. Times are
seconds of any monotonic clock that the caller passes in.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from specextend.core import DocumentKey, Values
from specextend.data.inputs import DocumentError
from specextend.data.rows import Row
from specextend.stats import DecodingStats

MAX_LOSSES = 10
"""Leases that a document may lose uncharged, with a node or with a worker that it is not known to
have started at.
"""
LOSSES_ALONE = 2
"""Such losses after which a document runs alone."""


class Place(NamedTuple):
    """A place that a worker runs on, by names under which the next start finds it again."""

    host: str
    device: str
    """Its accelerators, or its seat if there are none."""


class Lease(NamedTuple):
    """One document handed to one worker, once."""

    lease_id: str
    key: DocumentKey
    num_tokens: int
    """Prompt and output, estimated."""
    attempt: int
    """1 for the first; what the row's `attempts` becomes."""
    is_alone: bool = False
    """True if the document may be at fault for a failure, so that nothing else runs beside it."""


class GivenUp(NamedTuple):
    """A document that becomes an error row."""

    key: DocumentKey
    attempts: int
    error_class: str
    message: str


class Tried(NamedTuple):
    """The attempts of earlier starts of the run at a document."""

    attempts: int
    """All attempts that were charged."""
    struck: frozenset[Place] = frozenset()
    """The places where they were charged."""
    forgiven: int = 0
    """Those of them that ended in an error row which is to be done again: they do not count towards
    `max_attempts`.
    """


@dataclass(slots=True)
class OpenDocument:
    """A document that is leased, or of which there is something to remember."""

    key: DocumentKey
    num_tokens: int
    attempts: int = 0
    forgiven: int = 0
    """Attempts that do not count towards `max_attempts`."""
    struck: set[Place] = field(default_factory=set)
    """The places where it was held when a worker or a batch failed, charged or not."""
    losses: int = 0

    @property
    def num_counted(self) -> int:
        """Count the attempts that count towards `max_attempts`."""
        return self.attempts - self.forgiven

    @property
    def runs_alone(self) -> bool:
        """Return True if its next failure may fail its neighbours, too."""
        return bool(self.struck) or self.losses >= LOSSES_ALONE


@dataclass(slots=True)
class HeldLease:
    """A lease in force."""

    lease: Lease
    document: OpenDocument
    worker: str
    started_at: float | None = None


@dataclass(slots=True)
class Holder:
    """A worker and the leases that it holds."""

    place: Place
    moved_at: float
    leases: dict[str, HeldLease] = field(default_factory=dict)
    num_closing: int = 0
    """Leases taken back whose call has not returned yet."""
    num_steps: int = -1
    rests_until: float = -math.inf
    is_alone: bool = False
    """True while it holds one document that runs alone."""
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
        """Return True if every document that it holds was struck elsewhere, too: that explains its
        death.
        """
        return bool(self.leases) and all(
            held.document.struck - {self.place} for held in self.leases.values()
        )


class Done(NamedTuple):
    """The result of a document: a row of a commit, and its counts."""

    row: Values
    stats: DecodingStats
    used_gib: float
    """The most memory that its worker had used by then."""


class Failed(NamedTuple):
    """A document that failed. If its `stage` is `read` and it is `retryable`, another worker may be
    able to read it.
    """

    doc_id: str
    """Empty if the document was not read."""
    error_class: str
    message: str
    stage: str
    """`read`, `prompt` or `decode`; `worker` if the worker itself failed."""
    retryable: bool
    """True if another machine or a later try may succeed."""
    content_sha256: str | None = None
    """Hash of the row, by which later runs know it; None if the document was not read."""
    summary: str | None = None
    """What was written, if it is to be kept."""
    tasks: list[Values] | None = None
    """What the tasks have answered that did not fail, if there are several."""


def failed_row(error: DocumentError, row: Row | None) -> Failed:
    """Return the failure of a document. row: what was read of it, if it could be."""
    doc_id, content = (
        (error.doc_id, error.content_sha256) if row is None else (row.doc_id, row.content_sha256)
    )
    facts = error.error_class, error.message, error.stage, error.retryable
    return Failed(doc_id, *facts, content, error.summary, error.tasks)


class Suspected(NamedTuple):
    """A document whose batch failed through its fault or a neighbour's. It is tried again alone,
    which decides that.
    """

    error_class: str
    message: str


Outcome = Done | Failed | Suspected


@dataclass(frozen=True)
class WorkerInfo:
    """The place where a worker runs."""

    node_id: str
    host: str
    pid: int
    device: str
    accelerators: tuple[str, ...] = ()
    """Accelerators that Ray has assigned to it, such as `GPU 3`."""
    limits: dict[str, float] | None = None
    """What its device can do and what its target asks of it (`Engine.limits`); None if that is not
    known.
    """
    kernels: list[Values] = field(default_factory=list)
    """What came of each kernel that it tried: its `name`, whether it was `taken`, and `why`."""


class WorkerReport(NamedTuple):
    """The answer to a poll."""

    num_steps: int
    outputs: dict[str, int]
    """Output tokens so far by lease id, for leases whose prefill has begun."""


@dataclass(frozen=True)
class Begun:
    """A worker has a process: the cluster had room for it."""

    worker: str


@dataclass(frozen=True)
class Ready:
    """A worker's models are loaded."""

    worker: str
    info: WorkerInfo


@dataclass(frozen=True)
class StartFailed:
    """A worker's models could not be loaded."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Returned:
    """A lease has its outcome."""

    worker: str
    lease: Lease
    outcome: Outcome


@dataclass(frozen=True)
class CallLost:
    """A lease's call ended without outcome while its worker lives: it was cancelled, or lost on the
    way.
    """

    worker: str
    lease: Lease
    reason: str


@dataclass(frozen=True)
class Polled:
    """A worker's progress."""

    worker: str
    report: WorkerReport


@dataclass(frozen=True)
class Draining:
    """A worker's node is about to go: a spot instance that is reclaimed, or one that is taken out
    of the cluster.
    """

    worker: str


@dataclass(frozen=True)
class Died:
    """A worker is gone."""

    worker: str
    reason: str
    with_node: bool
    """True if its node is down or out of reach, so that no document is to blame."""


Event = Begun | Ready | StartFailed | Returned | CallLost | Polled | Draining | Died
