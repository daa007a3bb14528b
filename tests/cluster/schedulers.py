"""Schedulers of a few documents, and what they have granted."""

from __future__ import annotations

from specextend.cluster.messages import Lease, Place
from specextend.cluster.scheduler import Scheduler
from specextend.config import JobOptions
from specextend.core import DocumentKey
from tests.cluster.lengths import rows_of_length

JOB = JobOptions(max_attempts=2, document_deadline_s=10, stall_s=30)


def key(row: int) -> DocumentKey:
    return DocumentKey(0, row)


def scheduler(lengths: list[int], leases_per_worker: int = 3, job: JobOptions = JOB) -> Scheduler:
    return Scheduler(rows_of_length(lengths), job, leases_per_worker)


def at(worker: str) -> Place:
    """A place of its own for a worker."""
    return Place(f"host of {worker}", "seat 1")


def granted(grants: list[tuple[str, Lease]], worker: str | None = None) -> list[int]:
    return [lease.key.row for name, lease in grants if worker in (None, name)]


def ids(grants: list[tuple[str, Lease]]) -> dict[int, str]:
    return {lease.key.row: lease.lease_id for _, lease in grants}
