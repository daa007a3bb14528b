"""What a user can set of decoding. Frozen, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["autoregressive", "tree", "specextend"]
Policy = Literal["full", "streaming", "retrieval"]
Refresh = Literal["every", "acceptance", "coverage", "once"]
ScoreHeads = Literal["mean", "max"]
ChunkBoundaries = Literal["fixed", "sentence"]


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError unless `value` reaches `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingOptions:
    """`decoding.*`"""

    mode: Mode = "specextend"
    """`specextend` runs attention and cache as configured, `tree` runs dense attention and the full cache,
    `autoregressive` loads no draft."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """The run's seed; a document's is derived from it and its id."""
    stop: tuple[str, ...] = ()
    max_batch_size: int = 1
    """Sequences decoded together."""
    cache_gib: float = 2.0
    """GiB of the target's KV cache."""

    def __post_init__(self) -> None:
        one_of("decoding.mode", self.mode, ("autoregressive", "tree", "specextend"))
        at_least("decoding.max_new_tokens", self.max_new_tokens, 1)
        at_least("decoding.temperature", self.temperature, 0)
        at_least("decoding.top_k", self.top_k, 0)
        at_least("decoding.max_batch_size", self.max_batch_size, 1)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"decoding.top_p must be in (0, 1], got {self.top_p}")
        if self.cache_gib <= 0:
            raise ValueError(f"decoding.cache_gib must be above 0, got {self.cache_gib}")
        if any(not stop for stop in self.stop):
            raise ValueError("decoding.stop must not hold an empty string")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """`attention.*`"""

    backend: Literal["auto", "reference", "sdpa", "flash"] = "auto"
    """`auto` takes the fastest that is proven on the device."""
    tree: Literal["auto", "dense", "hybrid"] = "auto"
    """`hybrid`: flash over the prefix, masked over the tree, merged by LSE. `dense`: one masked call. `auto`: whichever
    start-up measured to be faster at the sequences' current lengths."""

    def __post_init__(self) -> None:
        one_of("attention.backend", self.backend, ("auto", "reference", "sdpa", "flash"))
        one_of("attention.tree", self.tree, ("auto", "dense", "hybrid"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeOptions:
    """`tree.*` (METHOD: OPT-Tree)"""

    nodes: int | Literal["auto"] = 16
    """Draft tokens verified in one step, the root not counted. `auto`: as many as pay, from measured step times, and
    none where a plain step is faster; in mode `tree` always `max_nodes`."""
    max_nodes: int = 15
    """Draft tokens at most where `nodes` is `auto`; with the root they are the rows of a forward."""
    depth: int = 6
    """Levels of drafting at most."""
    ngram_depth: int = 16
    """Levels of copied text at most, with `draft.kind` ngram or `draft.ngram`."""
    threshold: float = 0.05
    """Stop drafting when a level adds less than this many expected accepted tokens."""

    def __post_init__(self) -> None:
        if isinstance(self.nodes, str):
            one_of("tree.nodes", self.nodes, ("auto",))
        at_least("tree.nodes", self.most_nodes, 1)
        at_least("tree.max_nodes", self.max_nodes, 1)
        at_least("tree.depth", self.depth, 1)
        at_least("tree.ngram_depth", self.ngram_depth, 1)
        at_least("tree.threshold", self.threshold, 0)

    @property
    def most_nodes(self) -> int:
        """Draft tokens of one step at most, whatever `nodes` is."""
        return self.max_nodes if isinstance(self.nodes, str) else self.nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """`cache.*`: what the draft may see of the document."""

    policy: Policy = "retrieval"
    """`full`: everything; `streaming`: sinks and recent tokens; `retrieval`: those and the chunks that the target
    attends to most."""
    chunk_size: int = 32
    """Tokens of a chunk."""
    top_k_chunks: int = 32
    """Visible chunks, the forced ones (sinks, recent) included."""
    sinks: int = 32
    """First tokens, always visible; rounded up to chunks."""
    recent: int = 128
    """Last tokens, always visible; rounded up to chunks."""
    refresh: Refresh = "every"
    """`every` `refresh_every` steps, on falling `acceptance`, on falling `coverage` (the share of the target's
    attention that visible rows have), or `once` after prefill."""
    refresh_every: int = 32
    """Steps between two retrievals; under `coverage`, between two looks at the attention."""
    draft_prefill_window: int = 512
    """Tokens a draft attends back to in prefill."""
    score_layers: tuple[int, ...] = (-1,)
    """The target's layers whose attention `retrieval` trusts, from 0 or, negative, from the last one back; of several
    the mean."""
    score_heads: ScoreHeads = "mean"
    """What a chunk's score is over the heads of a layer: the `mean`, or the `max`, so that one head is enough."""
    chunk_boundaries: ChunkBoundaries = "fixed"
    """Of `retrieval`: `fixed` cuts every `chunk_size` tokens, `sentence` at ends of sentences, as many whole ones to a
    chunk as `chunk_size` tokens hold; output is cut every `chunk_size` tokens."""

    def __post_init__(self) -> None:
        one_of("cache.policy", self.policy, ("full", "streaming", "retrieval"))
        one_of("cache.refresh", self.refresh, ("every", "acceptance", "coverage", "once"))
        for name, least in (("chunk_size", 1), ("top_k_chunks", 1), ("sinks", 0), ("recent", 1)):
            at_least(f"cache.{name}", getattr(self, name), least)
        at_least("cache.refresh_every", self.refresh_every, 1)
        at_least("cache.draft_prefill_window", self.draft_prefill_window, 1)
        one_of("cache.score_heads", self.score_heads, ("mean", "max"))
        one_of("cache.chunk_boundaries", self.chunk_boundaries, ("fixed", "sentence"))
        if not self.score_layers:
            raise ValueError("cache.score_layers must name a layer at least; -1 is the last one")
        # However the end of the text is aligned: two tokens can touch two chunks. Nor do sentences end with the sinks.
        forced = -(-self.sinks // self.chunk_size) + -(-(self.recent - 1) // self.chunk_size) + 1
        forced += int(self.chunk_boundaries == "sentence" and self.sinks > 0)
        if self.policy == "retrieval" and self.top_k_chunks < forced:
            raise ValueError(
                f"cache.top_k_chunks is {self.top_k_chunks} but cache.sinks and cache.recent alone can take {forced}"
            )
