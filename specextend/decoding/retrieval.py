"""Cross-model retrieval: which committed positions the draft may see (METHOD, step 8; arXiv 2505.20776, section 3).

Shapes: `H` query heads, `K` key heads, `G` = H / K, `D` head size, `S` committed tokens, `C` chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.decoding.chunks import Chunks
from specextend.decoding.options import CacheOptions, ScoreHeads
from specextend.stats import DecodingStats


def scored_layers(options: CacheOptions, num_layers: int) -> tuple[int, ...]:
    """The target's layers that retrieval scores by, from 0, ascending; none where the policy is another.

    Raises ValueError for one that a target of `num_layers` layers does not have, whatever the policy.
    """
    for layer in options.score_layers:
        if not -num_layers <= layer < num_layers:
            raise ValueError(
                f"cache.score_layers names layer {layer}, but the target has {num_layers} (0 to {num_layers - 1}, or "
                f"-{num_layers} to -1 from the last)"
            )
    layers = {layer % num_layers for layer in options.score_layers}
    return tuple(sorted(layers)) if options.policy == "retrieval" else ()


def chunk_mass(query: Tensor, keys: Tensor, chunks: Chunks, scale: float, heads: ScoreHeads = "mean") -> Tensor:
    """[C] fp32: the share of one query's attention on each chunk. Sums to 1.

    query [H, D] of the last accepted node, keys [S, K, D] of all committed tokens; scores in fp32. Over heads the
    mean, or each chunk's largest share, then scaled to the sum of 1.
    """
    num_key_heads, head_dim = keys.shape[1:]
    grouped = query.float().view(num_key_heads, -1, head_dim)  # [K, G, D]
    weights = (torch.matmul(grouped, keys.float().permute(1, 2, 0)) * scale).softmax(-1)
    if heads == "mean":
        return chunks.sums(weights.mean((0, 1)))
    largest = chunks.sums(weights).amax((0, 1))
    return largest / largest.sum()


def mean_mass(
    queries: Sequence[Tensor], keys: Sequence[Tensor], chunks: Chunks, scale: float, heads: ScoreHeads
) -> Tensor:
    """[C] fp32: the mean of `chunk_mass` over layers, one query and one set of keys for each."""
    masses = [chunk_mass(*layer, chunks, scale, heads) for layer in zip(queries, keys, strict=True)]
    return masses[0] if len(masses) == 1 else torch.stack(masses).mean(0)


@dataclass(frozen=True, slots=True)
class Selection:
    """Chunks that are visible, in document order."""

    chunks: Tensor
    """[n] int64, ascending, on the CPU"""
    forced: Tensor
    """[C] bool: visible whatever their score (sinks and the recent window)"""

    def positions(self, edges: Tensor) -> Tensor:
        """[S] int64 positions of the visible tokens, ascending; `edges` [C + 1] of all chunks."""
        visible = torch.zeros_like(self.forced)
        visible[self.chunks] = True
        return visible.repeat_interleave(edges.diff()).nonzero().flatten()

    def by_score(self) -> set[int]:
        """The chunks that are there for their score."""
        return set(self.chunks[~self.forced[self.chunks]].tolist())


def forced_chunks(edges: Tensor, options: CacheOptions) -> Tensor:
    """[C] bool: the chunks that hold some of the first `sinks` and of the last `recent` tokens."""
    return (edges[:-1] < options.sinks) | (edges[1:] > int(edges[-1]) - options.recent)


def select_by_score(mass: Tensor, edges: Tensor, options: CacheOptions) -> Selection:
    """The forced chunks and the best others by mean score a token; a tie goes to the earlier chunk.

    `top_k_chunks` chunks in all or, where chunks are shorter than `chunk_size`, the tokens of as many full ones.
    """
    forced, sizes = forced_chunks(edges, options), edges.diff()
    ranked = (mass / sizes).masked_fill(forced, float("inf")).sort(descending=True, stable=True).indices
    fits = sizes[ranked].cumsum(0) <= options.top_k_chunks * options.chunk_size
    return Selection(ranked[fits | forced[ranked]].sort().values, forced)


def select_recent(edges: Tensor, options: CacheOptions) -> Selection:
    """The sink chunks and the most recent ones, `top_k_chunks` in all (StreamingLLM, with the same budget)."""
    total = len(edges) - 1
    sinks = min(int((edges[:-1] < options.sinks).sum()), options.top_k_chunks - 1)
    first_recent = max(sinks, total - (options.top_k_chunks - sinks))
    visible = torch.ones(total, dtype=torch.bool)
    visible[sinks:first_recent] = False
    return Selection(visible.nonzero().flatten(), visible)


LEAST_COVERAGE = 0.8
"""Under `refresh: coverage`, the part of a selection's first coverage that must be left."""


class CachePolicy:
    """What one sequence's draft may see, and when that is decided anew. Lives as long as its request."""

    def __init__(self, options: CacheOptions) -> None:
        self._options = options
        self.chunks = Chunks(options.chunk_size)
        """Where the request's text is cut; a `Cutter` knows better once the prompt is there."""
        self._chosen: set[int] | None = None
        self._selection: Selection | None = None
        self._coverage = 0.0  # right after the last selection
        self._steps = 0  # since the last selection, or look at the attention
        self._num_observed = 0
        self._selected_at = 0
        self._recent_accepted: float | None = None
        self._mean_accepted = 0.0

    @property
    def needs_scores(self) -> bool:
        """Whether `select` wants the target's attention mass."""
        return self._options.policy == "retrieval"

    def observe(self, num_accepted: int) -> None:
        """Take note of a verification of a tree."""
        self._steps += 1
        self._num_observed += 1
        self._mean_accepted += (num_accepted - self._mean_accepted) / self._num_observed
        before = self._mean_accepted if self._recent_accepted is None else self._recent_accepted
        self._recent_accepted = 0.75 * before + 0.25 * num_accepted

    def observe_plain(self) -> None:
        """Take note of a plain step."""
        self._steps += 1

    def is_due(self, num_tokens: int) -> bool:
        """Whether to select again, `num_tokens` being committed; under `coverage`, whether to ask `still_covers`."""
        if self._options.policy == "full":
            return False
        if self._options.policy == "streaming":
            return num_tokens - self._selected_at >= self._options.chunk_size
        if self._options.refresh in ("every", "coverage"):
            return self._steps >= self._options.refresh_every
        return self._options.refresh == "acceptance" and self._acceptance_fell()

    def still_covers(self, mass: Tensor | None) -> bool:
        """Whether the selection holds, by the attention `mass` [C] of now: a cheap look between two retrievals.

        It does under `coverage` while the share on visible rows is `LEAST_COVERAGE` of what the selection began with.
        What was committed since is visible.
        """
        if self._options.refresh != "coverage" or self._selection is None or mass is None:
            return False
        self._steps = 0
        seen = mass[self._selection.chunks.to(mass.device)].sum() + mass[len(self._selection.forced) :].sum()
        return float(seen) >= LEAST_COVERAGE * self._coverage

    def select(self, num_tokens: int, mass: Tensor | None, stats: DecodingStats) -> Tensor:
        """[S] positions to show of `num_tokens` committed ones; `mass` [C] where `needs_scores`."""
        self._selected_at = num_tokens
        if self._options.policy == "full":
            return torch.arange(num_tokens)
        edges = self.chunks.edges(num_tokens)
        if mass is None:
            return select_recent(edges, self._options).positions(edges)
        mass = mass.cpu()
        selection = select_by_score(mass, edges, self._options)
        self._count(selection, mass, stats)
        self._selection, self._coverage = selection, float(mass[selection.chunks].sum())
        self._recent_accepted, self._steps, self._num_observed = None, 0, 0
        return selection.positions(edges)

    def _acceptance_fell(self) -> bool:
        """Eight steps or more since the last selection, and recent acceptance under 3/4 of the mean since then."""
        return (
            self._recent_accepted is not None
            and self._num_observed >= 8
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
