"""The tokens that every prompt of a run begins with, such as those of a chat template: the target reads them once.

Shapes: `L` layers, `K` key heads, `D` head size, `n` tokens of the start, `F` features of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specextend.decoding.cache import KVCache


@dataclass(slots=True)
class SharedStart:
    """Token ids, and what the target made of them when it read them first.

    The attention of a token depends on no later one, so every prompt with this start has these very rows.
    """

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
