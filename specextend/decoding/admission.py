"""Admission of requests: queue, room in batch and caches, smaller sizes after memory ran out."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from specextend.core import Request, counted
from specextend.decoding.cache import KVCache, Region, aligned
from specextend.decoding.tree import Drafter

Work = Literal["prefill", "step"]
SMALLEST_CHUNK = 32
PATIENCE = 8
"""Documents before the full size is tried again; doubled after failures."""


class Admission:
    """Reserves slots of the batch and rows of the caches."""

    def __init__(
        self,
        cache: KVCache,
        drafter: Drafter,
        num_drafts: int,
        max_tokens: int,
        max_batch_size: int,
    ):
        self._cache = cache
        self._drafter = drafter
        self._scratch = num_drafts + drafter.num_levels + 2 if drafter.num_levels else 1
        self.max_tokens = max_tokens
        self._num_rows = cache.rows.num_free
        self._slots = list(reversed(range(max_batch_size)))

    def check(self, request: Request) -> None:
        """Raise ValueError unless a request can run in an empty engine."""
        num_tokens = len(request.prompt_token_ids) + request.max_new_tokens
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"prompt ({len(request.prompt_token_ids)}) and max_new_tokens "
                f"({request.max_new_tokens}) "
                f"exceed the {self.max_tokens} tokens that the context leaves; shorten one of them"
            )
        recent = self._cache.recent
        if recent is not None and request.max_new_tokens > recent.sizes.most_new_tokens:
            raise ValueError(
                f"max_new_tokens is {request.max_new_tokens}, and layers with a window have "
                f"room for {recent.sizes.most_new_tokens}; raise decoding.max_new_tokens"
            )
        if aligned(num_tokens + self._scratch) > self._num_rows:
            held = counted(self._num_rows, "row")
            raise ValueError(
                f"{num_tokens:,} tokens do not fit the cache of {held}; raise decoding.cache_gib"
            )

    def admit(self, request: Request) -> tuple[int, Region] | None:
        """Reserve a slot, which must be free, and cache rows; return None without room.

        Raises:
            ValueError: The draft can never take the request.
        """
        num_prompt = len(request.prompt_token_ids)
        num_new = request.max_new_tokens
        slot = self._slots[-1]
        if not self._drafter.admit(slot, num_prompt, num_new):
            return None
        region = self._cache.rows.take(num_prompt + num_new + self._scratch)
        if region is None:
            self._drafter.release(slot)
            return None
        self._slots.pop()
        return slot, region

    def release(self, slot: int, region: Region) -> None:
        """Free a slot and its rows."""
        self._cache.rows.give_back(region)
        self._slots.append(slot)
        self._drafter.release(slot)


class Queue:
    """Waiting requests (without room, or restarted), then the source."""

    def __init__(self, requests: Iterator[Request | None]):
        self._requests = requests
        self._waiting: deque[Request] = deque()
        self.num_retries: dict[str, int] = {}
        """Restarts after memory ran out, by id."""
        self._ended = False

    @property
    def exhausted(self) -> bool:
        """Return True if no further request will come."""
        return self._ended and not self._waiting

    def peek(self) -> Request | None:
        """Return the next request, which stays in the queue, if there is one now."""
        if not self._waiting and not self._ended:
            try:
                request = next(self._requests)
            except StopIteration:
                self._ended = True
            else:
                self._waiting.extend([] if request is None else [request])
        return self._waiting[0] if self._waiting else None

    def pop(self) -> None:
        """Remove the request of the last `peek`."""
        self._waiting.popleft()

    def give_back(self, again: Sequence[Request]) -> None:
        """Put requests in front of all others."""
        self._waiting.extendleft(reversed(again))

    def drop(self, names: set[str]) -> None:
        """Remove waiting requests by id."""
        self._waiting = deque(each for each in self._waiting if each.request_id not in names)


class MemoryLadder:
    """Allowed sizes of batch, tree and prefill chunk, which shrink after memory ran out.

    Caches are allocated at the start, so only the memory of a forward can run out. It grows with
    these sizes, and none of them changes an output.
    """

    def __init__(self, batch_size: int, num_drafts: int, chunk_size: int):
        """Allow the full sizes; `num_drafts` is 0 without a draft."""
        self._all = batch_size, num_drafts, chunk_size
        self.start()

    def start(self) -> None:
        """Allow the full sizes again."""
        self.batch_size, self.num_drafts, self.chunk_size = self._all
        self._patience = PATIENCE
        self._num_ended = 0

    def lower(self, work: Work, size: int, num_active: int) -> bool:
        """Lower a size after memory ran out; return False if no size can be lowered.

        For a step: fewer sequences, then smaller trees, then none. For a prefill: smaller chunks,
        then no draft, then a batch of one. `size` are sequences of the step, or tokens of the
        prompt.
        """
        self._num_ended = 0
        chunk_size = min(size, self.chunk_size)
        if work == "step" and size > 1:
            self.batch_size = min(self.batch_size, size // 2)
        elif work == "prefill" and chunk_size > SMALLEST_CHUNK:
            self.chunk_size = max(SMALLEST_CHUNK, chunk_size // 2)
        elif self.num_drafts:
            self.num_drafts = self.num_drafts // 2 if work == "step" else 0
        elif work == "prefill" and num_active > 1:
            self.batch_size = 1
        else:
            return False
        return True

    def ended(self) -> None:
        """Count a finished or failed document. After enough of them, allow the full sizes."""
        if (self.batch_size, self.num_drafts, self.chunk_size) == self._all:
            return
        self._num_ended += 1
        if self._num_ended >= self._patience:
            patience = 2 * self._patience
            self.start()
            self._patience = patience
