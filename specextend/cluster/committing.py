"""Commits: finished rows and records of a start, which the driver writes while it holds the lock. Nothing else does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specextend.cluster.exits import writing
from specextend.cluster.leases import Tried
from specextend.cluster.lock import OutputLock
from specextend.cluster.records import Attempt
from specextend.core import DocumentKey
from specextend.data.audit_rows import AuditWriter
from specextend.data.commits import CommitWriter
from specextend.data.storage import Location

RECORD_EVERY_S = 10.0
"""Seconds between two writes of the record of a start because workers have come or gone: as often as the heartbeat."""

LEAST_ROWS, ROWS_PER_WORKER = 64, 8
"""Rows of a commit: so many for each worker, so that a large run leaves thousands of files and not many more."""


def rows_per_commit(workers: int) -> int:
    """Return the finished documents after which so many workers' driver writes them."""
    return max(LEAST_ROWS, ROWS_PER_WORKER * workers)


class Committer:
    """Finished rows, which it writes as a commit once there are enough of them or the oldest has waited long enough."""

    def __init__(
        self,
        output: Location,
        writer: CommitWriter,
        audit_writer: AuditWriter,
        lock: OutputLock,
        every_rows: int,
        every_s: float,
    ) -> None:
        self._output, self._lock = output, lock
        self._writer, self._audit_writer = writer, audit_writer
        self._every_rows, self._every_s = every_rows, every_s
        self._rows: list[dict[str, Any]] = []
        self._audits: list[dict[str, Any]] = []
        self._oldest = 0.0
        self._recorded_at = -RECORD_EVERY_S

    def add(self, row: dict[str, Any], now: float) -> None:
        """Add a row."""
        self._begin(now)
        self._rows.append(row)

    def audited(self, rows: Iterable[dict[str, Any]], now: float) -> None:
        """Add rows of the audit."""
        self._begin(now)
        self._audits += rows

    @property
    def _has_rows(self) -> bool:
        return bool(self._rows or self._audits)

    def _begin(self, now: float) -> None:
        if not self._has_rows:
            self._oldest = now

    def commit_if_due(self, now: float) -> None:
        """Write a commit if one is due. Raises LockLostError and LockGoneError even if there is nothing to write."""
        self._lock.check_heard()
        if len(self._rows) >= self._every_rows or (self._has_rows and now - self._oldest >= self._every_s):
            self.commit()

    def commit(self) -> None:
        """Write the rows there are. Raises LockLostError, LockGoneError and OutputError."""
        with writing(self._output):
            self._writer.commit(self._rows)
            self._audit_writer.commit(self._audits)
        self._rows, self._audits = [], []

    def remember(self, attempt: Attempt, charges: Mapping[DocumentKey, Tried]) -> None:
        """Record which open documents have been charged. Raises as `commit` does."""
        self._lock.check()
        with writing(self._output):
            attempt.charged(charges)

    def record_if_due(self, attempt: Attempt, now: float) -> None:
        """Write which workers have come and gone, if that has changed and was not written just now.

        Raises as `commit` does.
        """
        if attempt.is_changed and now - self._recorded_at >= RECORD_EVERY_S:
            self._lock.check()
            with writing(self._output):
                attempt.write()
            self._recorded_at = now
