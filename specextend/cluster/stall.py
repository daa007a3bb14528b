"""The guard over the whole job: a night in which nothing moves ends loudly, not in the morning. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specextend.cluster.exits import StalledRunError
from specextend.core import DocumentKey

MOST_NAMES = 10
"""Documents of a kind that the message names."""


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
