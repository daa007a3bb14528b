"""Cross-model retrieval: which committed positions the draft may see (arXiv 2505.20776, section 3).

A text is cut into chunks of `cache.chunk_size` tokens, the last of which may be shorter.

Shapes: `H` query heads, `K` key heads, `G` = H / K, `D` head size, `S` committed tokens, `C`
chunks.
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
"""Steps between two retrievals if their cost was not measured."""


def scored_layers(options: CacheOptions, layers: Sequence[AttentionLayer]) -> tuple[int, ...]:
    """Return the target's layers that score the chunks, ascending from 0; none unless the policy is
    `retrieval`.

    Raises:
        ValueError: Under any policy, the options name a layer that the target lacks or that does
        not see the whole text; or no layer does, under `retrieval`.
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
    """Return each chunk's share [C] fp32 of one query's attention, the mean over heads. Shares add
    up to 1.

    query [H, D] of the last accepted node, keys [K, S, D] of all committed tokens; scores in fp32.
    """
    num_key_heads, _, head_dim = keys.shape
    grouped = query.float().view(num_key_heads, -1, head_dim)  # [K, G, D]
    weights = (torch.matmul(grouped, keys.float().transpose(1, 2)) * scale).softmax(-1).mean((0, 1))
    return pad(weights, (0, -len(weights) % chunk_size)).view(-1, chunk_size).sum(-1)


def mean_mass(
    queries: Sequence[Tensor], keys: Sequence[Tensor], chunk_size: int, scale: float
) -> Tensor:
    """Return the mean [C] fp32 of `chunk_mass` over layers, one query and one set of keys for
    each.
    """
    layers = zip(queries, keys, strict=True)
    return torch.stack([chunk_mass(*layer, chunk_size, scale) for layer in layers]).mean(0)


def visible_positions(chunks: Tensor, num_tokens: int, chunk_size: int) -> Tensor:
    """Return the positions [S] int64 of the tokens in `chunks` [n] of a text of `num_tokens`, both
    ascending.
    """
    positions = (chunks[:, None] * chunk_size + torch.arange(chunk_size)).flatten()
    return positions[positions < num_tokens]


def forced_chunks(num_tokens: int, options: CacheOptions) -> Tensor:
    """Mark the first chunk, and the chunks [C] bool that hold some of the last `recent` tokens."""
    starts = torch.arange(0, num_tokens, options.chunk_size)
    return (starts == 0) | (starts + options.chunk_size > num_tokens - options.recent)


def select_by_score(mass: Tensor, num_tokens: int, options: CacheOptions) -> Tensor:
    """Select the forced chunks and the best others by `mass` [C], `top_k_chunks` in all; a tie goes
    to the earlier.

    Returns the chunks [n], ascending.
    """
    forced = forced_chunks(num_tokens, options)
    ranked = mass.masked_fill(forced, float("inf")).sort(descending=True, stable=True).indices
    return ranked[: options.top_k_chunks].sort().values


def select_recent(num_tokens: int, options: CacheOptions) -> Tensor:
    """Select the first chunk and the most recent ones, `top_k_chunks` in all (StreamingLLM, with
    the same budget).

    Returns the chunks [n], ascending.
    """
    total = -(-num_tokens // options.chunk_size)
    num_first = min(1, options.top_k_chunks - 1)
    first_recent = max(num_first, total - (options.top_k_chunks - num_first))
    return torch.cat([torch.arange(num_first), torch.arange(first_recent, total)])


@dataclass
class CachePolicy:
    """Decides what one sequence's draft may see, and when to select again. Lives as long as its
    request.
    """

    _options: CacheOptions
    _chosen: set[int] | None = None
    _num_steps: int = 0  # since the last selection
    _selected_at: int = 0

    def count_step(self) -> None:
        """Count a step, speculative or plain."""
        self._num_steps += 1

    def is_due(self, num_tokens: int, auto_steps: int = REFRESH_EVERY) -> bool:
        """Return True if it is time to select again, now that `num_tokens` tokens are committed.

        auto_steps: Steps between two retrievals if `cache.refresh_every` is `auto`.
        """
        if self._options.policy == "full":
            return False
        if self._options.policy == "streaming":
            return num_tokens - self._selected_at >= self._options.chunk_size
        steps = self._options.refresh_every
        return self._num_steps >= (auto_steps if steps == "auto" else steps)

    def select(self, num_tokens: int, mass: Tensor, stats: DecodingStats) -> Tensor:
        """Choose which positions [S] of `num_tokens` committed ones to show; `mass` [C] counts
        under `retrieval`.
        """
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
        """Add a retrieval to the statistics, with the change of the chunks `by_score` from the one
        before.
        """
        chosen = set(by_score.tolist())
        if self._chosen is not None:
            union = self._chosen | chosen
            stats.retrieval_churn_sum += (
                1 - len(self._chosen & chosen) / len(union) if union else 0.0
            )
        self._chosen = chosen
        stats.num_retrievals += 1
