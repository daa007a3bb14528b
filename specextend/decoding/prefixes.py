"""Prompts that begin alike: what the target read for one of them is copied for the next (prefix caching).

The attention of a token depends on no later one, so prompts with the same first n tokens have the same n cache rows. A
draft reads every prompt itself, from the target's features; that takes little time.

Shapes: `L` layers, `K` key heads, `D` head size, `F` features of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specextend.decoding.cache import KVCache

LEAST_REUSED = 256
"""Tokens that a prompt must have in common with the one before it, and half of its own, to take its rows."""


@dataclass(slots=True)
class SharedStart:
    """Keeps the rows of tokens that every prompt of a run begins with, such as those of a chat template."""

    token_ids: Sequence[int]
    rows: Tensor | None = None
    """Keys and values [L, 2, K, n, D]."""
    features: Tensor | None = None
    """What a draft is given for these tokens, [1, n, F]."""

    def length_in(self, prompt_token_ids: Sequence[int], chunk_size: int) -> int:
        """Return n, or 0 for a prompt with another start or with nothing behind it, or where n is above chunk_size."""
        n = len(self.token_ids)
        begins = n < len(prompt_token_ids) and list(prompt_token_ids[:n]) == list(self.token_ids)
        return n if begins and n <= chunk_size else 0

    def keep(self, cache: KVCache, first_row: int, features: Tensor) -> None:
        """Copy what the target wrote to the cache from `first_row` on; `features` [1, n, F] came with it."""
        self.rows = cache.stored[:, :, :, first_row : first_row + len(self.token_ids)].clone()
        self.features = features.clone()

    def write(self, cache: KVCache, first_row: int) -> Tensor:
        """Write the rows for another prompt, from `first_row` on; return the features [1, n, F]."""
        assert self.rows is not None, "kept before"
        assert self.features is not None, "kept with the rows"
        cache.stored[:, :, :, first_row : first_row + len(self.token_ids)] = self.rows
        return self.features


@dataclass(slots=True)
class LastPrompt:
    """The prompt that the target read last, for one that asks something else about the same document.

    Its rows stay in the cache until the next prompt is read, even if its request has ended: nothing else is ever
    written to a region that no running request has.
    """

    token_ids: Sequence[int]
    first_row: int
    features: list[Tensor] = field(default_factory=list)
    """What a draft is given for its chunks, each [1, n, F]."""

    def length_in(self, prompt_token_ids: Sequence[int]) -> int:
        """Return the tokens to take over for another prompt, whose last token is never among them; 0 if too few."""
        pairs = zip(self.token_ids, prompt_token_ids[:-1], strict=False)
        common = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        n = min(len(self.token_ids), len(prompt_token_ids) - 1) if common is None else common
        return n if n >= max(LEAST_REUSED, len(prompt_token_ids) / 2) else 0

    def write(self, cache: KVCache, first_row: int, count: int) -> list[Tensor]:
        """Copy the first `count` rows to `first_row` on; return their features in chunks [1, n, F]."""
        cache.copy(self.first_row, first_row, count)
        chunks, left = [], count
        for chunk in self.features:
            chunks.append(chunk if chunk.shape[1] <= left else chunk[:, :left].clone())  # a view would keep all of it
            left -= chunks[-1].shape[1]
            if not left:
                break
        return chunks
