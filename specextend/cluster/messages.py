"""The messages between the driver and its workers: small values that can be pickled, without Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specextend.stats import DecodingStats


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a document: a row of a part, and its counts."""

    row: dict[str, Any]
    stats: DecodingStats


@dataclass(frozen=True, slots=True)
class Failed:
    """A document that cannot be processed; if `stage` is `read` and it is `retryable`, not by this worker now."""

    doc_id: str
    """Empty if the document was not read."""
    error_class: str
    message: str
    stage: str
    """`read`, `prompt` or `decode`."""
    retryable: bool
    """True if another machine or a later try may succeed."""


@dataclass(frozen=True, slots=True)
class Suspected:
    """A document whose batch failed: it or a neighbour is to blame. It is tried again alone, which leaves no doubt."""

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
    """What Ray has given it, such as `GPU 3`."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The answer to a poll."""

    num_steps: int
    outputs: dict[str, int]
    """Lease id -> output tokens so far, for leases whose prefill has begun."""
