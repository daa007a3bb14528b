"""Leases, and the messages and events exchanged by driver and workers. Pure and picklable.

A failure that may be the fault of its document charges the document an attempt. After
`job.max_attempts` charges the document is given up.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specextend.cluster.backlog import TokenEstimate
from specextend.core import DocumentKey, Values
from specextend.data.inputs import DocumentError
from specextend.data.rows import Row
from specextend.stats import DecodingStats


class Place(NamedTuple):
    """Location of a worker, the same in later starts."""

    host: str
    device: str
    """Accelerators, or the seat number without accelerators."""


class Lease(NamedTuple):
    """A document handed to a worker."""

    lease_id: str
    key: DocumentKey
    estimate: TokenEstimate
    attempt: int
    """Number from 1; becomes `attempts` of the row."""
    is_alone: bool = False
    """True if nothing may run beside it, because it may have caused a failure."""


class Tried(NamedTuple):
    """Attempts of earlier starts at a document."""

    attempts: int
    struck: frozenset[Place] = frozenset()
    forgiven: int = 0
    """Attempts with an error row to be retried, not counted towards `max_attempts`."""


class Done(NamedTuple):
    """A document's output row and counts."""

    row: Values
    stats: DecodingStats
    used_gib: float
    speedup: float | None = None
    """Speedup over plain decoding in the worker's last draft trial."""


def with_document(error: DocumentError, row: Row | None) -> DocumentError:
    """Add the id and hash of `row`, if the document could be read."""
    if row is not None:
        error.doc_id = row.doc_id
        error.content_sha256 = row.content_sha256
    return error


class SuspectedError(DocumentError):
    """A failed batch. Its documents are tried again, each alone."""


class Lost(NamedTuple):
    """A call was cancelled or lost, while its worker lives."""

    reason: str


Outcome = Done | DocumentError | Lost
"""Another worker may succeed after a retryable error in stage `read`."""


class WorkerInfo(NamedTuple):
    """A ready worker."""

    node_id: str
    host: str
    pid: int
    device: str
    accelerators: tuple[str, ...] = ()
    """Names such as `GPU 3`."""
    limits: dict[str, float] | None = None
    """Values of `Engine.limits`, if known."""
    kernels: Sequence[Values] = ()
    """`name`, `taken` and `why` of each kernel."""


class WorkerReport(NamedTuple):
    """Answer to a poll."""

    num_steps: int
    outputs: dict[str, int]
    """Output tokens by lease id, after the start of prefill."""


class Begun(NamedTuple):
    """A worker has a process."""

    worker: str


class Ready(NamedTuple):
    """A worker has loaded its models."""

    worker: str
    info: WorkerInfo


class StartFailed(NamedTuple):
    """A worker could not load."""

    worker: str
    reason: str


class Returned(NamedTuple):
    """A lease has an outcome."""

    worker: str
    lease: Lease
    outcome: Outcome


class Polled(NamedTuple):
    """A worker has reported."""

    worker: str
    report: WorkerReport


class Draining(NamedTuple):
    """A worker's node is about to go."""

    worker: str


class Died(NamedTuple):
    """A worker is gone."""

    worker: str
    reason: str
    with_node: bool
    """True if its node is gone, so that no document is to blame."""


Event = Begun | Ready | StartFailed | Returned | Polled | Draining | Died
