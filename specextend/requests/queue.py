"""The order in which an engine receives requests. Begin at `Inbox`."""

import bisect
import threading
from collections.abc import Iterable

from specextend.core import Request


class Inbox:
    """Queue of requests for the engine: longest first, requests about one document in a row.

    The engine reads a document once for consecutive requests. Thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._last: list[int] = []
        """First half of the last prompt; prompts with the same start share its document."""
        self._changed = threading.Condition()

    def put(self, request: Request) -> None:
        """Add a request to the queue."""
        with self._changed:
            bisect.insort(self._waiting, request, key=_longest_first)
            self._changed.notify()

    def take(self, block: bool) -> Request | None:
        """Remove and return the next request; None if there is none and `block` is False."""
        with self._changed:
            while block and not self._waiting:
                self._changed.wait()
            if not self._waiting:
                return None
            prompts = (request.prompt_token_ids for request in self._waiting)
            place = next((n for n, prompt in enumerate(prompts) if _begins(prompt, self._last)), 0)
            request = self._waiting.pop(place)
            self._last = request.prompt_token_ids[: len(request.prompt_token_ids) // 2]
            return request

    def remove(self, request_id: str) -> bool:
        """Remove a request; return False if it is not there."""
        with self._changed:
            kept = [request for request in self._waiting if request.request_id != request_id]
            found = len(kept) < len(self._waiting)
            self._waiting = kept
            return found


def _longest_first(request: Request) -> tuple[int, str]:
    return -len(request.prompt_token_ids) - request.max_new_tokens, request.request_id


def _begins(token_ids: list[int], start: list[int]) -> bool:
    n = len(start)
    # comparing one token first avoids a copy for most prompts
    return not n or (
        len(token_ids) >= n and token_ids[n - 1] == start[-1] and token_ids[:n] == start
    )


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return requests in the order in which an `Inbox` hands them out."""
    inbox = Inbox()
    for request in requests:
        inbox.put(request)
    return [*iter(lambda: inbox.take(block=False), None)]
