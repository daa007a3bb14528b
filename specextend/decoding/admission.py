"""Which requests may run: they must fit the context, and find cache rows and a free place in the batch."""

from __future__ import annotations

from specextend.core import Request
from specextend.decoding.cache import KVCache, Region, aligned
from specextend.decoding.drafter import Drafter


class Admission:
    """Places in the batch and rows of the caches."""

    def __init__(
        self, cache: KVCache, drafter: Drafter | None, num_nodes: int, max_tokens: int, max_batch_size: int
    ) -> None:
        """`num_nodes` of a tree at most, the root not counted."""
        self._cache, self._drafter = cache, drafter
        self._scratch = num_nodes + drafter.num_levels + 2 if drafter else 1
        self.max_tokens = max_tokens
        """Prompt and output tokens of one request, at most."""
        self._num_rows = cache.rows.num_free
        self._places = list(reversed(range(max_batch_size)))

    @property
    def has_place(self) -> bool:
        """Whether the batch has room for one more."""
        return bool(self._places)

    def check(self, request: Request) -> None:
        """Raise ValueError where the request could never run."""
        num_tokens = len(request.prompt_token_ids) + request.max_new_tokens
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"prompt ({len(request.prompt_token_ids)}) and max_new_tokens ({request.max_new_tokens}) "
                f"exceed the {self.max_tokens} tokens that the context leaves; shorten one of them"
            )
        if aligned(num_tokens + self._scratch) > self._num_rows:
            raise ValueError(
                f"{num_tokens} tokens do not fit the cache of {self._num_rows} rows; raise decoding.cache_gib"
            )

    def admit(self, request: Request) -> tuple[int, Region] | None:
        """A place and the target's rows for the request; None where there is no room now."""
        num_prompt, num_new = len(request.prompt_token_ids), request.max_new_tokens
        region = self._cache.rows.take(num_prompt + num_new + self._scratch) if self._places else None
        if region is None:
            return None
        if self._drafter is not None and not self._drafter.admit(self._places[-1], num_prompt, num_new):
            self._cache.rows.give_back(region)
            return None
        return self._places.pop(), region

    def release(self, place: int, region: Region) -> None:
        """Take back what `admit` gave."""
        self._cache.rows.give_back(region)
        self._places.append(place)
        if self._drafter is not None:
            self._drafter.release(place)
