"""How fast workers are, by what they have done, and which documents a slow one had better leave to others. Pure.

A cluster may mix kinds of devices. Most of a night each worker simply takes the next document when it has room, so the
fast ones do more. Only at the end does it matter who does what: a long document on a slow worker runs on while the
others are idle.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

MIN_DONE = 8
"""Documents that a worker must have done before its own speed counts; before that, that of its kind does."""
MUCH_SLOWER = 1.5
"""Factor below the fastest kind from which a worker counts as slow: single workers differ by less from day to day."""


@dataclass(slots=True)
class _Speed:
    """Tokens of documents done, and the seconds at work that they took."""

    num_done: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Return tokens per second; None if too few documents are done."""
        return self.num_tokens / self.seconds if self.num_done >= MIN_DONE and self.seconds > 0 else None


@dataclass(slots=True)
class _Runner:
    """A worker's kind and speed, and until when its time is accounted for."""

    kind: str
    speed: _Speed = field(default_factory=_Speed)
    accounted_at: float | None = None
    """None while it holds no lease."""


class Speeds:
    """Measured speeds of the workers that there are, and of their kinds."""

    def __init__(self, slots: int) -> None:
        """Take the number of documents that a worker has at once."""
        self._slots = slots
        self._runners: dict[str, _Runner] = {}
        self._kinds: dict[str, _Speed] = {}
        self._num: Counter[str] = Counter()

    def join(self, worker: str, kind: str) -> None:
        """Note a worker on a kind of device."""
        self._runners[worker] = _Runner(kind)
        self._kinds.setdefault(kind, _Speed())
        self._num[kind] += 1

    def leave(self, worker: str) -> None:
        """Note that a worker takes no more documents."""
        if (runner := self._runners.pop(worker, None)) is not None:
            self._num[runner.kind] -= 1

    def at_work(self, worker: str, now: float) -> None:
        """Note that a worker has a lease."""
        runner = self._runners.get(worker)
        if runner is not None and runner.accounted_at is None:
            runner.accounted_at = now

    def done(self, worker: str, num_tokens: int, now: float, *, is_idle: bool) -> None:
        """Note that a worker has done a document, and whether it has no other."""
        if (runner := self._runners.get(worker)) is None or runner.accounted_at is None:
            return
        for speed in (runner.speed, self._kinds[runner.kind]):
            speed.num_done += 1
            speed.num_tokens += num_tokens
            speed.seconds += now - runner.accounted_at
        runner.accounted_at = None if is_idle else now

    def longest_for(self, worker: str, num_tokens_open: int) -> float:
        """Return the tokens of the longest document that a worker would end before all is done; infinite if it is fast.

        num_tokens_open: of all open documents.
        """
        rates = {kind: self._kinds[kind].rate for kind, num in self._num.items() if num}
        known = {kind: rate for kind, rate in rates.items() if rate is not None}
        runner = self._runners.get(worker)
        own = None if runner is None else runner.speed.rate or known.get(runner.kind)
        if own is None or own * MUCH_SLOWER > max(known.values(), default=0.0):
            return math.inf
        left_s = num_tokens_open / sum(self._num[kind] * rate for kind, rate in known.items())
        return left_s * own / self._slots
