"""The guards over the whole job: a night in which nothing moves, or most fails, ends loudly, and early. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from specextend.cluster.exits import StalledRunError, TooManyErrorsError
from specextend.cluster.messages import Failed
from specextend.core import DocumentKey

MOST_NAMES = 10
"""Documents of a kind that the message names."""
MIN_ENDED = 100
"""Documents that must have ended before their error rate says anything."""
MIN_SHARE = 0.01
"""Share of a start's documents for which the same holds: the longest come first, and may fail for being long."""


class ErrorGuard:
    """Watches the share of a start's documents that fail.

    Rows whose own content is at fault (null text, over length) are no sign of a broken run, and are not counted.
    """

    def __init__(self, limit: float, num_documents: int) -> None:
        """`limit`: share above which the run stops; `num_documents`: to do in this start."""
        self._limit = limit
        self._least = max(MIN_ENDED, MIN_SHARE * num_documents)
        self._num_done = 0
        self._failed: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def done(self) -> None:
        """Count a document that is done."""
        self._num_done += 1

    def failed(self, doc_id: str, failed: Failed) -> None:
        """Count a document that became an error row, unless its own content is at fault."""
        if failed.stage in ("read", "prompt") and not failed.retryable:
            return
        self._failed[failed.error_class] += 1
        self._examples.setdefault(failed.error_class, f"{doc_id}: {failed.message}")

    def check(self) -> None:
        """Raise TooManyErrorsError once enough documents have ended and too many of them have failed."""
        num_failed = self._failed.total()
        num_ended = self._num_done + num_failed
        if num_ended < self._least or num_failed <= self._limit * num_ended:
            return
        [(name, _)] = self._failed.most_common(1)
        raise TooManyErrorsError(
            f"stopped early: {num_failed} of {num_ended} documents failed, more than job.stop_error_fraction "
            f"{self._limit:g} allows, most often with {name}, such as {self._examples[name]}; what is done is kept: "
            "mend the cause and run again with --retry-errors, or allow more"
        )


class StallGuard:
    """Watches for a token from any worker.

    A worker that hangs is replaced long before. This is for what no worker can tell of: none that comes up, a cluster
    that never grows, calls that never arrive.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        """`limit_s` without a token are too many; `now` in seconds of any monotonic clock, as later."""
        self._limit_s = limit_s
        self._moved_at = now
        self._steps: dict[str, int] = {}

    def stepped(self, worker: str, num_steps: int, now: float) -> None:
        """A worker's counter of prefill chunks and decoding steps: where it moves, tokens were read or written."""
        if num_steps > self._steps.get(worker, 0):
            self._moved_at = now
        self._steps[worker] = num_steps

    def ended(self, now: float) -> None:
        """A document has its outcome."""
        self._moved_at = now

    def is_stalled(self, now: float) -> bool:
        """Whether the last token is too long ago."""
        return now - self._moved_at > self._limit_s

    def error(
        self,
        num_workers: int,
        leased: Sequence[DocumentKey],
        waiting: Sequence[DocumentKey],
        place: Callable[[DocumentKey], str],
    ) -> StalledRunError:
        """Says what the job is at: documents that workers hold, and those that wait.

        place: where a document is, said without reading: its store may be what does not answer.
        """
        workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}" if num_workers else "no worker is"
        parts = [f"no token for {self._limit_s:.0f} s: {workers} ready"]
        for begin, keys in (("at work on", leased), ("waiting:", waiting)):
            more = f" and {len(keys) - MOST_NAMES} more" if len(keys) > MOST_NAMES else ""
            parts += [f"{begin} {', '.join(map(place, keys[:MOST_NAMES]))}{more}"] if keys else []
        return StalledRunError("; ".join([*parts, "what is done is kept, run again"]))
