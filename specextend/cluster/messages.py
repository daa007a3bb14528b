"""Leases, the messages between the driver and its workers, which can be pickled, and the events of
workers. Pure.

A lease is one document handed to one worker, once. A document is charged an attempt when its lease
ends in a way that may be its fault; after `job.max_attempts` of these it is given up. Times are
seconds of any monotonic clock that the caller passes in.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specextend.cluster.backlog import TokenEstimate
from specextend.core import DocumentKey, Values
from specextend.data.inputs import DocumentError
from specextend.data.rows import Row
from specextend.stats import DecodingStats


class Place(NamedTuple):
    """A place that a worker runs on, by names under which the next start finds it again."""

    host: str
    device: str
    """Its accelerators, or its seat if there are none."""


class Lease(NamedTuple):
    """One document handed to one worker, once."""

    lease_id: str
    key: DocumentKey
    estimate: TokenEstimate
    attempt: int
    """1 for the first; what the row's `attempts` becomes."""
    is_alone: bool = False
    """True if the document may be at fault for a failure, so that nothing else runs beside it."""


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


class Done(NamedTuple):
    """The result of a document: a row of a commit, and its counts."""

    row: Values
    stats: DecodingStats
    used_gib: float
    """The most memory that its worker had used by then."""
    speedup: float | None = None
    """How many times as fast as plain decoding drafts made the worker's last trial."""


def with_document(error: DocumentError, row: Row | None) -> DocumentError:
    """Return an error with what is known of its document. row: what was read of it, if it could
    be.
    """
    if row is not None:
        error.doc_id = row.doc_id
        error.content_sha256 = row.content_sha256
    return error


class SuspectedError(DocumentError):
    """A document whose batch failed through its fault or a neighbour's. It is tried again alone,
    which decides that.
    """


class Lost(NamedTuple):
    """The call of a lease ended without outcome while its worker lives: it was cancelled, or lost
    on the way.
    """

    reason: str


Outcome = Done | DocumentError | Lost
"""What became of a lease. If an error's `stage` is `read` and it is `retryable`, another worker may
be able to read the document.
"""


class WorkerInfo(NamedTuple):
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
    kernels: Sequence[Values] = ()
    """What came of each kernel that it tried: its `name`, whether it was `taken`, and `why`."""


class WorkerReport(NamedTuple):
    """The answer to a poll."""

    num_steps: int
    outputs: dict[str, int]
    """Output tokens so far by lease id, for leases whose prefill has begun."""


class Begun(NamedTuple):
    """A worker has a process: the cluster had room for it."""

    worker: str


class Ready(NamedTuple):
    """A worker's models are loaded."""

    worker: str
    info: WorkerInfo


class StartFailed(NamedTuple):
    """A worker's models could not be loaded."""

    worker: str
    reason: str


class Returned(NamedTuple):
    """A lease has its outcome."""

    worker: str
    lease: Lease
    outcome: Outcome


class Polled(NamedTuple):
    """A worker's progress."""

    worker: str
    report: WorkerReport


class Draining(NamedTuple):
    """A worker's node is about to go: a spot instance that is reclaimed, or one that is taken out
    of the cluster.
    """

    worker: str


class Died(NamedTuple):
    """A worker is gone."""

    worker: str
    reason: str
    with_node: bool
    """True if its node is down or out of reach, so that no document is to blame."""


Event = Begun | Ready | StartFailed | Returned | Polled | Draining | Died
