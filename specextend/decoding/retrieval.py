"""Cross-model retrieval: which committed positions the draft may see (METHOD, step 8; arXiv 2505.20776, section 3).

Shapes: `H` query heads, `K` key heads, `G` = H / K, `D` head size, `S` committed tokens, `C` chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.decoding.options import CacheOptions
from specextend.stats import DecodingStats


def num_chunks(num_tokens: int, chunk_size: int) -> int:
    """Chunks that hold `num_tokens` tokens, the last one perhaps partly."""
    return -(-num_tokens // chunk_size)


def chunk_mass(query: Tensor, keys: Tensor, chunk_size: int, scale: float) -> Tensor:
    """[C] fp32: the share of one query's attention on each chunk, mean over heads. Sums to 1.

    query [H, D] of the last accepted node, keys [S, K, D] of all committed tokens; scores in fp32.
    """
    num_keys, num_key_heads, head_dim = keys.shape
    grouped = query.float().view(num_key_heads, -1, head_dim)  # [K, G, D]
    scores = torch.matmul(grouped, keys.float().permute(1, 2, 0)) * scale
    mass = scores.softmax(-1).mean((0, 1))
    padding = num_chunks(num_keys, chunk_size) * chunk_size - num_keys
    return torch.nn.functional.pad(mass, (0, padding)).view(-1, chunk_size).sum(1)


@dataclass(frozen=True, slots=True)
class Selection:
    """Chunks that are visible, in document order."""

    chunks: Tensor
    """[n] int64, ascending, on the CPU"""
    forced: Tensor
    """[C] bool: visible whatever their score (sinks and the recent window)"""

    def positions(self, num_tokens: int, chunk_size: int) -> Tensor:
        """[S] int64 positions of the visible tokens, ascending."""
        positions = (self.chunks[:, None] * chunk_size + torch.arange(chunk_size)).flatten()
        return positions[positions < num_tokens]

    def by_score(self) -> set[int]:
        """The chunks that are there for their score."""
        return set(self.chunks[~self.forced[self.chunks]].tolist())


def forced_chunks(num_tokens: int, options: CacheOptions) -> Tensor:
    """[C] bool: the chunks of the first `sinks` and of the last `recent` tokens."""
    forced = torch.zeros(num_chunks(num_tokens, options.chunk_size), dtype=torch.bool)
    forced[: num_chunks(options.sinks, options.chunk_size)] = True
    forced[max(0, num_tokens - options.recent) // options.chunk_size :] = True
    return forced


def select_by_score(mass: Tensor, num_tokens: int, options: CacheOptions) -> Selection:
    """The forced chunks and the best others by mean score, `top_k_chunks` in all; a tie goes to the earlier chunk.

    The partial last chunk's mean is over its true length.
    """
    forced = forced_chunks(num_tokens, options)
    sizes = torch.full_like(mass, options.chunk_size)
    sizes[-1] = num_tokens - (len(mass) - 1) * options.chunk_size
    ranked = (mass / sizes).masked_fill(forced, float("inf")).sort(descending=True, stable=True).indices
    return Selection(ranked[: max(options.top_k_chunks, int(forced.sum()))].sort().values, forced)


def select_recent(num_tokens: int, options: CacheOptions) -> Selection:
    """The sink chunks and the most recent ones, `top_k_chunks` in all (StreamingLLM, with the same budget)."""
    total = num_chunks(num_tokens, options.chunk_size)
    sinks = min(num_chunks(options.sinks, options.chunk_size), options.top_k_chunks - 1, total)
    first_recent = max(sinks, total - (options.top_k_chunks - sinks))
    visible = torch.ones(total, dtype=torch.bool)
    visible[sinks:first_recent] = False
    return Selection(visible.nonzero().flatten(), visible)


class CachePolicy:
    """What one sequence's draft may see, and when that is decided anew. Lives as long as its request."""

    def __init__(self, options: CacheOptions) -> None:
        self._options = options
        self._chosen: set[int] | None = None
        self._steps = 0
        self._selected_at = 0
        self._recent_accepted: float | None = None
        self._mean_accepted = 0.0

    @property
    def needs_scores(self) -> bool:
        """Whether `select` wants the target's attention mass."""
        return self._options.policy == "retrieval"

    def observe(self, num_accepted: int) -> None:
        """Take note of a verification step."""
        self._steps += 1
        self._mean_accepted += (num_accepted - self._mean_accepted) / self._steps
        before = self._mean_accepted if self._recent_accepted is None else self._recent_accepted
        self._recent_accepted = 0.75 * before + 0.25 * num_accepted

    def is_due(self, num_tokens: int) -> bool:
        """Whether to select again, `num_tokens` being committed."""
        if self._options.policy == "full":
            return False
        if self._options.policy == "streaming":
            return num_tokens - self._selected_at >= self._options.chunk_size
        if self._options.refresh == "every":
            return self._steps % self._options.refresh_every == 0
        return self._options.refresh == "acceptance" and self._acceptance_fell()

    def select(self, num_tokens: int, mass: Tensor | None, stats: DecodingStats) -> Tensor:
        """[S] positions to show of `num_tokens` committed ones; `mass` [C] where `needs_scores`."""
        self._selected_at = num_tokens
        if self._options.policy == "full":
            return torch.arange(num_tokens)
        if mass is None:
            return select_recent(num_tokens, self._options).positions(num_tokens, self._options.chunk_size)
        mass = mass.cpu()
        selection = select_by_score(mass, num_tokens, self._options)
        self._count(selection, mass, stats)
        self._recent_accepted, self._steps = None, 0
        return selection.positions(num_tokens, self._options.chunk_size)

    def _acceptance_fell(self) -> bool:
        """Eight steps or more since the last selection, and recent acceptance under 3/4 of the mean since then."""
        return (
            self._recent_accepted is not None
            and self._steps >= 8
            and (self._recent_accepted < 0.75 * self._mean_accepted)
        )

    def _count(self, selection: Selection, mass: Tensor, stats: DecodingStats) -> None:
        chosen = selection.by_score()
        if self._chosen is not None:
            union = self._chosen | chosen
            stats.retrieval_churn_sum += 1 - len(self._chosen & chosen) / len(union) if union else 0.0
        self._chosen = chosen
        stats.num_retrievals += 1
        stats.retrieval_coverage_sum += min(1.0, float(mass[selection.chunks].sum()))  # fp32 shares may add up to more
