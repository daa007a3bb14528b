"""The audit: some documents are decoded once more without a draft, to see that their summaries are the target's own.

Plain decoding is timed, too, so its sequences run in batches of their own, as large as those of the job: beside
speculating neighbours they would pay for rows that are not theirs. Pure, apart from the lock of `Auditor`.
"""

import threading
from dataclasses import dataclass, replace
from hashlib import blake2b

from specextend.cluster.messages import Suspected
from specextend.core import Completion, DocumentKey, Request, Values
from specextend.data.audit_rows import audit_row
from specextend.data.inputs import DocumentError

_PREFIX = "audit of "
_RESOLUTION = 1 << 64


def is_sampled(seed: int, fraction: float) -> bool:
    """Return True if the document with this seed is in the sample: the same ones in every start of a run."""
    digest = blake2b(f"audit:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * _RESOLUTION


@dataclass(slots=True)
class _Case:
    """A document that is audited, and the number of those that are decoded with it."""

    key: DocumentKey
    doc_id: str
    completion: Completion
    request: Request
    batch_size: int = 0


class Auditor:
    """A worker's documents to audit, and the rows that came of them. Thread-safe."""

    def __init__(self, fraction: float, batch_size: int):
        self._fraction, self._batch_size = fraction, batch_size
        self._lock = threading.Lock()
        self._waiting: list[_Case] = []
        self._running: dict[str, _Case] = {}
        self._rows: list[Values] = []
        self.is_ending = False
        """True once no further document will come, so that batches need not be full."""

    @property
    def num_open(self) -> int:
        """Count the documents that are not audited yet."""
        with self._lock:
            return len(self._waiting) + len(self._running)

    @property
    def is_due(self) -> bool:
        """Return True if there is a batch to decode."""
        with self._lock:
            return len(self._waiting) >= (1 if self.is_ending else self._batch_size)

    def offer(self, key: DocumentKey, doc_id: str, request: Request, completion: Completion) -> None:
        """Note that a document is done; it is audited if the sample has it."""
        if not is_sampled(request.sampling.seed, self._fraction):
            return
        again = replace(request, request_id=_PREFIX + request.request_id, audit_of=tuple(completion.token_ids))
        with self._lock:
            self._waiting.append(_Case(key, doc_id, completion, again))

    def take(self) -> list[Request]:
        """Return the requests of a batch that is due, for an engine with nothing else in it."""
        with self._lock:
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            for case in batch:
                case.batch_size = len(batch)
            self._running = {case.request.request_id: case for case in batch}
            return [case.request for case in batch]

    def settle(self, request_id: str, outcome: Completion | DocumentError | Suspected) -> bool:
        """Take the outcome of a request in. Returns False if it is no audit's."""
        with self._lock:
            if (case := self._running.pop(request_id, None)) is not None:
                self._rows.append(self._row(case, outcome))
        return request_id.startswith(_PREFIX)

    def fail_batch(self, failure: Suspected) -> None:
        """Note that everything in the engine has failed."""
        for name in list(self._running):
            self.settle(name, failure)

    def rows(self, num_seen: int) -> tuple[Values, ...]:
        """Return the rows that follow the first `num_seen`: a poll may be lost, so each is shown until it was seen."""
        with self._lock:
            return tuple(self._rows[num_seen:])

    def _row(self, case: _Case, outcome: Completion | DocumentError | Suspected) -> Values:
        if isinstance(outcome, Completion):
            row = audit_row(case.key, case.doc_id, case.completion, outcome)
        else:
            error = f"{outcome.error_class}: {outcome.message}"
            row = audit_row(case.key, case.doc_id, case.completion, None, error)
        return row | {"batch_size": case.batch_size, "is_full_batch": case.batch_size == self._batch_size}
