"""Which worker cannot read, and which document cannot be read: one failure does not tell. Pure.

A node without the input's mount fails every document in no time, so it would be leased all of them. A damaged row
group fails at every worker. Whoever fails alone is in doubt; a second worker that fails too clears the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from specextend.core import DocumentKey

MAX_DOUBTS = 3
"""Documents in a row that a worker alone could not read before it gets no more while another one is there."""
PAUSE_S = 10.0
"""Seconds before a document goes to a worker again that could not read it, where there is no other."""


class Readers:
    """Who could not read what, among open documents and living workers."""

    def __init__(self) -> None:
        self._tried: dict[DocumentKey, list[str]] = {}
        self._retry_at: dict[DocumentKey, float] = {}
        self._doubts: dict[str, set[DocumentKey]] = {}

    def failed(self, worker: str, key: DocumentKey, now: float) -> None:
        """A worker could not read a document."""
        tried = self._tried.setdefault(key, [])
        if not tried:
            self._doubts.setdefault(worker, set()).add(key)
        self._clear(key, but=worker)
        tried.append(worker)
        self._retry_at[key] = now + PAUSE_S

    def read(self, worker: str, key: DocumentKey) -> None:
        """A worker has read a document; those that had failed at it remain in doubt."""
        self._doubts.pop(worker, None)
        self._tried.pop(key, None)
        self._retry_at.pop(key, None)

    def given_up(self, key: DocumentKey) -> None:
        """Nobody has read it."""
        if self._tried.pop(key, None) is not None:
            self._retry_at.pop(key)
            self._clear(key)

    def left(self, worker: str) -> None:
        """A worker is gone."""
        self._doubts.pop(worker, None)

    def is_unread(self, key: DocumentKey) -> bool:
        """Whether a worker has failed at it, and none has read it since."""
        return key in self._tried

    def is_in_doubt(self, worker: str) -> bool:
        """Whether a worker fails at what nobody else is known to fail at."""
        return len(self._doubts.get(worker, ())) >= MAX_DOUBTS

    def may_try(self, key: DocumentKey, workers: Sequence[str], now: float) -> list[str]:
        """Those of the living workers that a document may go to: who has not tried it, or after a pause anybody."""
        fresh = [worker for worker in workers if worker not in self._tried[key]]
        return fresh or (list(workers) if now >= self._retry_at[key] else [])

    def _clear(self, key: DocumentKey, but: str = "") -> None:
        for worker, keys in self._doubts.items():
            if worker != but:
                keys.discard(key)
