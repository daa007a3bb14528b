"""Requests that wait for an engine, and the order in which it gets them."""

import bisect
import threading
from collections.abc import Iterable
from operator import itemgetter

from specextend.core import Request


class Inbox:
    """Requests that wait for the engine, longest first, but those about one document one after another.

    An engine reads a document once for requests that follow each other. Thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, str, Request]] = []
        """Negative sizes, ids and requests, sorted by the first two."""
        self._last: list[int] = []
        """The first half of the prompt that was taken last: what begins so, too, is about the same document."""
        self._changed = threading.Condition()

    def put(self, request: Request) -> None:
        """Add a request."""
        with self._changed:
            size = len(request.prompt_token_ids) + request.max_new_tokens
            bisect.insort(self._waiting, (-size, request.request_id, request), key=itemgetter(0, 1))
            self._changed.notify()

    def take(self, block: bool) -> Request | None:
        """Remove and return the next request; None if there is none and `block` is False."""
        with self._changed:
            while block and not self._waiting:
                self._changed.wait()
            if not self._waiting:
                return None
            prompts = (request.prompt_token_ids for _, _, request in self._waiting)
            place = next((n for n, prompt in enumerate(prompts) if _begins(prompt, self._last)), 0)
            request = self._waiting.pop(place)[2]
            self._last = request.prompt_token_ids[: len(request.prompt_token_ids) // 2]
            return request

    def remove(self, request_id: str) -> bool:
        """Remove a request. Returns False if it does not wait here any more."""
        with self._changed:
            kept = [entry for entry in self._waiting if entry[1] != request_id]
            found = len(kept) < len(self._waiting)
            self._waiting = kept
            return found


def _begins(token_ids: list[int], start: list[int]) -> bool:
    """Return True if the tokens begin with `start`; its last one tells most others apart without a copy."""
    n = len(start)
    return not n or (len(token_ids) >= n and token_ids[n - 1] == start[-1] and token_ids[:n] == start)


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return requests in the order of an `Inbox` that holds all of them."""
    inbox = Inbox()
    for request in requests:
        inbox.put(request)
    return [*iter(lambda: inbox.take(block=False), None)]
