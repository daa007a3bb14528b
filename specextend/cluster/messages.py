"""What the driver and its workers say to each other. Small values that pickle; no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specextend.stats import DecodingStats


@dataclass(frozen=True, slots=True)
class Done:
    """A document's result: a row of a part, and its counts."""

    row: dict[str, Any]
    stats: DecodingStats


@dataclass(frozen=True, slots=True)
class Failed:
    """A document that cannot be done; where `stage` is `read` and `retryable` holds, by this worker now."""

    doc_id: str
    """Empty where it was not read."""
    error_class: str
    message: str
    stage: str
    """`read`, `prompt` or `decode`."""
    retryable: bool
    """Whether another machine or another day may help."""


@dataclass(frozen=True, slots=True)
class Suspected:
    """A batch failed in which the document was: it may be to blame, or a neighbour. Alone there is no doubt."""

    error_class: str
    message: str


Outcome = Done | Failed | Suspected


class EngineBrokenError(RuntimeError):
    """The engine raised outside any step of requests: the worker must be replaced."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs."""

    node_id: str
    host: str
    pid: int
    device: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A poll's answer."""

    num_steps: int
    outputs: dict[str, int]
    """Lease id -> output tokens so far, of leases whose prefill has begun."""


def first_line(error: BaseException) -> str:
    """An exception's message, or its class where it has none, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
