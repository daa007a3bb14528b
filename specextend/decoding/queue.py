"""The requests that an engine has yet to run: its source, and those that it has to begin again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specextend.core import Request


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request to run."""

    request: Request
    num_memory_retries: int = 0
    """Times that it has begun and memory ran out."""


class Queue:
    """The source, with what waits before it: the request that finds no room yet, those that begin again."""

    def __init__(self, requests: Iterator[Request | None]) -> None:
        self._requests = requests
        self._waiting: deque[Waiting] = deque()
        self._ended = False

    @property
    def exhausted(self) -> bool:
        """Whether no request will come any more."""
        return self._ended and not self._waiting

    def peek(self) -> Waiting | None:
        """The next request; None where there is none now."""
        if not self._waiting and not self._ended:
            try:
                request = next(self._requests)
            except StopIteration:
                self._ended = True
            else:
                self._waiting.extend([] if request is None else [Waiting(request)])
        return self._waiting[0] if self._waiting else None

    def pop(self) -> None:
        """The request that was peeked at runs."""
        self._waiting.popleft()

    def give_back(self, again: Iterable[Waiting]) -> None:
        """Let these begin again, before all others."""
        self._waiting.extendleft(reversed(list(again)))

    def drop(self, names: set[str]) -> None:
        """Forget what waits under one of these names."""
        self._waiting = deque(each for each in self._waiting if each.request.request_id not in names)
