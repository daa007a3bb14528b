"""The messages between the driver and its workers, small values that can be pickled, and events of workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specextend.cluster.leases import Lease
from specextend.stats import DecodingStats


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a document: a row of a commit, and its counts."""

    row: dict[str, Any]
    stats: DecodingStats


@dataclass(frozen=True, slots=True)
class Failed:
    """A document that failed. If its `stage` is `read` and it is `retryable`, another worker may be able to read it."""

    doc_id: str
    """Empty if the document was not read."""
    error_class: str
    message: str
    stage: str
    """`read`, `prompt` or `decode`; `worker` if the worker itself failed."""
    retryable: bool
    """True if another machine or a later try may succeed."""


@dataclass(frozen=True, slots=True)
class Suspected:
    """A document whose batch failed through its fault or a neighbour's. It is tried again alone, which decides that."""

    error_class: str
    message: str


Outcome = Done | Failed | Suspected


class EngineBrokenError(RuntimeError):
    """The engine failed as a whole, not over a request: the worker must be replaced."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The place where a worker runs."""

    node_id: str
    host: str
    pid: int
    device: str
    accelerators: tuple[str, ...] = ()
    """Accelerators that Ray has assigned to it, such as `GPU 3`."""
    limits: dict[str, float] | None = None
    """What its device can do and what its target asks of it (`Engine.limits`); None if that is not known."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The answer to a poll."""

    num_steps: int
    outputs: dict[str, int]
    """Output tokens so far by lease id, for leases whose prefill has begun."""
    audits: tuple[dict[str, Any], ...] = ()
    """Rows of the audit behind those that the driver has seen."""
    num_audits_open: int = 0
    """Documents whose audit is not done yet."""
    is_ending: bool = False
    """True if the poll said that no further document will come."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker has a process: the cluster had room for it."""

    worker: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's models are loaded."""

    worker: str
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker's models could not be loaded."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A lease has its outcome."""

    worker: str
    lease: Lease
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CallLost:
    """A lease's call ended without outcome while its worker lives: it was cancelled, or lost on the way."""

    worker: str
    lease: Lease
    reason: str


@dataclass(frozen=True, slots=True)
class Polled:
    """A worker's progress."""

    worker: str
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker's node is about to go: a spot instance that is reclaimed, or one that is taken out of the cluster."""

    worker: str


@dataclass(frozen=True, slots=True)
class Dying:
    """A worker is gone. The `Died` that follows says what that means for its leases."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Died:
    """The verdict on a worker that is gone."""

    worker: str
    reason: str
    with_node: bool
    """True if its node is down or out of reach, so that no document is to blame."""


Event = Begun | Ready | StartFailed | Returned | CallLost | Polled | Draining | Dying | Died
