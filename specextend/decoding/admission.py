"""Admission of requests: their queue, the room in batch and caches, and smaller sizes after memory
ran out.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from specextend.core import Request, counted
from specextend.decoding.cache import KVCache, Region, aligned
from specextend.decoding.tree import Drafter

Work = Literal["prefill", "step"]
SMALLEST_CHUNK = 32
"""Prompt tokens of the smallest prefill chunk."""
PATIENCE = 8
"""Documents to finish with less before the full size is tried again; doubled after each failed
try.
"""


class Admission:
    """Hands out slots of the batch and rows of the caches."""

    def __init__(
        self,
        cache: KVCache,
        drafter: Drafter,
        num_nodes: int,
        max_tokens: int,
        max_batch_size: int,
    ):
        """Take all slots as free; `num_nodes` is the largest tree, the root not counted."""
        self._cache = cache
        self._drafter = drafter
        self._scratch = num_nodes + drafter.num_levels + 2 if drafter.num_levels else 1
        self.max_tokens = max_tokens
        """Prompt and output tokens of one request, at most."""
        self._num_rows = cache.rows.num_free
        self._slots = list(reversed(range(max_batch_size)))

    def check(self, request: Request) -> None:
        """Raise ValueError if the request can never run."""
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
        """Reserve a slot, of which one is free, and cache rows; return None if the caches have no
        room now.

        Raises ValueError if the draft can never take the request.
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
        """Free what `admit` reserved."""
        self._cache.rows.give_back(region)
        self._slots.append(slot)
        self._drafter.release(slot)


class Queue:
    """The request source, behind the requests that wait: one that found no room, and those that
    start again.
    """

    def __init__(self, requests: Iterator[Request | None]):
        self._requests = requests
        self._waiting: deque[Request] = deque()
        self.num_retries: dict[str, int] = {}
        """By id: times that a waiting request was started and memory ran out."""
        self._ended = False

    @property
    def exhausted(self) -> bool:
        """Return True once no further request will come."""
        return self._ended and not self._waiting

    def peek(self) -> Request | None:
        """Return the next request without removing it; None if there is none now."""
        if not self._waiting and not self._ended:
            try:
                request = next(self._requests)
            except StopIteration:
                self._ended = True
            else:
                self._waiting.extend([] if request is None else [request])
        return self._waiting[0] if self._waiting else None

    def pop(self) -> None:
        """Remove the request that `peek` returned, which runs now."""
        self._waiting.popleft()

    def give_back(self, again: Sequence[Request]) -> None:
        """Put these in front of all others, to start again."""
        self._waiting.extendleft(reversed(again))

    def drop(self, names: set[str]) -> None:
        """Remove the waiting requests with these ids."""
        self._waiting = deque(each for each in self._waiting if each.request_id not in names)


class MemoryLadder:
    """The sizes that may run at once: those configured, or smaller ones after memory ran out.

    The caches are allocated at the start. What runs out is the memory of a forward, which grows
    with the batch, the tree and the prefill chunk. None of these changes an output, so documents
    start again with smaller ones.
    """

    def __init__(self, batch_size: int, num_nodes: int, chunk_size: int):
        """Allow `batch_size` sequences, trees of `num_nodes` (0: no draft) and prefill chunks of
        `chunk_size`.
        """
        self._all = batch_size, num_nodes, chunk_size
        self.start()

    def start(self) -> None:
        """Allow the full size again, and forget how often memory ran out."""
        self.batch_size, self.num_nodes, self.chunk_size = self._all
        self._patience = PATIENCE
        self._num_ended = 0

    def lower(self, work: Work, size: int, num_active: int) -> bool:
        """Lower one size after `work` ran out of memory; return False if none can be lowered.

        A step takes fewer sequences, then smaller trees, then none; a prefill smaller chunks, then
        no draft, then no other sequence beside it. `size` is the number of sequences of the step,
        or of tokens of the prompt; `num_active` counts the sequences in the engine.
        """
        self._num_ended = 0
        chunk_size = min(size, self.chunk_size)
        if work == "step" and size > 1:
            self.batch_size = min(self.batch_size, size // 2)
        elif work == "prefill" and chunk_size > SMALLEST_CHUNK:
            self.chunk_size = max(SMALLEST_CHUNK, chunk_size // 2)
        elif self.num_nodes:
            self.num_nodes = self.num_nodes // 2 if work == "step" else 0
        elif work == "prefill" and num_active > 1:
            self.batch_size = 1
        else:
            return False
        return True

    def ended(self) -> None:
        """Count a document that is finished or given up; after enough of them, allow the full size
        again.
        """
        if (self.batch_size, self.num_nodes, self.chunk_size) == self._all:
            return
        self._num_ended += 1
        if self._num_ended >= self._patience:
            patience = 2 * self._patience
            self.start()
            self._patience = patience
