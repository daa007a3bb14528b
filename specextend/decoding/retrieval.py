"""Retrieval: the chunks of a text that the draft sees (arXiv 2505.20776, section 3).

Chunks have `cache.chunk_size` tokens; the last may be shorter.

More shapes: `S` committed tokens, `C` chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specextend.decoding.decoding_options import CacheOptions
from specextend.decoding.stock import AttentionLayer
from specextend.stats import DecodingStats

REFRESH_EVERY = 32
"""Steps between two retrievals of unknown cost."""


def scored_layers(options: CacheOptions, layers: Sequence[AttentionLayer]) -> tuple[int, ...]:
    """Return the layers of the target that score chunks, ascending; none without retrieval.

    Raises:
        ValueError: A layer is missing or does not see the whole text.
    """
    count = len(layers)
    whole = [n for n, layer in enumerate(layers) if layer.num_kv_heads and layer.window is None]
    for layer in options.score_layers:
        if not -count <= layer < count:
            raise ValueError(
                f"cache.score_layers names layer {layer}, but the target has {count} (0 to "
                f"{count - 1}, or -{count} to -1 from the last)"
            )
        if layer % count not in whole:
            raise ValueError(
                f"cache.score_layers names layer {layer}, which does not attend to the whole text; "
                f"{', '.join(map(str, whole)) or 'no layer'} of the target does"
            )
    if options.policy != "retrieval":
        return ()
    if not whole:
        raise ValueError(
            "no layer of the target attends to the whole text: set cache.policy to streaming"
        )
    return tuple(sorted({layer % count for layer in options.score_layers or whole[-1:]}))


def chunk_mass(query: Tensor, keys: Tensor, chunk_size: int, scale: float) -> Tensor:
    """Return each chunk's share [C] fp32 of attention, the mean over heads.

    Args:
        query: Query [H, D] of the last accepted node.
        keys: Keys [K, S, D] of all committed tokens.
    """
    num_key_heads, _, head_dim = keys.shape
    grouped = query.float().view(num_key_heads, -1, head_dim)  # [K, G, D]
    weights = (torch.matmul(grouped, keys.float().transpose(1, 2)) * scale).softmax(-1).mean((0, 1))
    return pad(weights, (0, -len(weights) % chunk_size)).view(-1, chunk_size).sum(-1)


def mean_mass(
    queries: Sequence[Tensor], keys: Sequence[Tensor], chunk_size: int, scale: float
) -> Tensor:
    """Return the mean [C] fp32 of `chunk_mass` over layers."""
    layers = zip(queries, keys, strict=True)
    return torch.stack([chunk_mass(*layer, chunk_size, scale) for layer in layers]).mean(0)


def visible_positions(chunks: Tensor, num_tokens: int, chunk_size: int) -> Tensor:
    """Return the positions [S] int64 of the tokens in `chunks` [n]; both ascending."""
    positions = (chunks[:, None] * chunk_size + torch.arange(chunk_size)).flatten()
    return positions[positions < num_tokens]


def forced_chunks(num_tokens: int, options: CacheOptions) -> Tensor:
    """Return a mask [C] of the first chunk and of chunks with `recent` tokens."""
    starts = torch.arange(0, num_tokens, options.chunk_size)
    return (starts == 0) | (starts + options.chunk_size > num_tokens - options.recent)


def select_by_score(mass: Tensor, num_tokens: int, options: CacheOptions) -> Tensor:
    """Select chunks [n], ascending: the forced chunks, and the best others by `mass` [C].

    The earlier of two equals wins.
    """
    forced = forced_chunks(num_tokens, options)
    ranked = mass.masked_fill(forced, float("inf")).sort(descending=True, stable=True).indices
    return ranked[: options.top_k_chunks].sort().values


def select_recent(num_tokens: int, options: CacheOptions) -> Tensor:
    """Select chunks [n], ascending: the first and the most recent, as StreamingLLM does."""
    total = -(-num_tokens // options.chunk_size)
    num_first = min(1, options.top_k_chunks - 1)
    first_recent = max(num_first, total - (options.top_k_chunks - num_first))
    return torch.cat([torch.arange(num_first), torch.arange(first_recent, total)])


@dataclass
class CachePolicy:
    """The visible part of a sequence's text, and the time of the next selection."""

    _options: CacheOptions
    _chosen: set[int] | None = None
    _num_steps: int = 0
    _selected_at: int = 0

    def count_step(self) -> None:
        """Count a step, speculative or plain."""
        self._num_steps += 1

    def is_due(self, num_tokens: int, auto_steps: int = REFRESH_EVERY) -> bool:
        """Return True if a selection is due; `auto_steps` is the interval for `auto`."""
        if self._options.policy == "full":
            return False
        if self._options.policy == "streaming":
            return num_tokens - self._selected_at >= self._options.chunk_size
        steps = self._options.refresh_every
        return self._num_steps >= (auto_steps if steps == "auto" else steps)

    def select(self, num_tokens: int, mass: Tensor, stats: DecodingStats) -> Tensor:
        """Return the visible positions [S], ascending; retrieval goes by shares `mass` [C]."""
        self._selected_at = num_tokens
        self._num_steps = 0
        if self._options.policy == "full":
            return torch.arange(num_tokens)
        if self._options.policy == "streaming":
            chunks = select_recent(num_tokens, self._options)
        else:
            chunks = select_by_score(mass, num_tokens, self._options)
            # fp32 shares may add up to more
            stats.retrieval_coverage_sum += min(1.0, float(mass[chunks].sum()))
            self._count(chunks[~forced_chunks(num_tokens, self._options)[chunks]], stats)
        return visible_positions(chunks, num_tokens, self._options.chunk_size)

    def _count(self, by_score: Tensor, stats: DecodingStats) -> None:
        chosen = set(by_score.tolist())
        if self._chosen is not None:
            union = self._chosen | chosen
            stats.retrieval_churn_sum += (
                1 - len(self._chosen & chosen) / len(union) if union else 0.0
            )
        self._chosen = chosen
        stats.num_retrievals += 1
