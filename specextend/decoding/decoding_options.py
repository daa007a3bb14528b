"""The options of decoding: `decoding.*`, `attention.*`, `tree.*` and `cache.*`. Frozen, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["autoregressive", "tree", "specextend"]
Policy = Literal["full", "streaming", "retrieval"]
Refresh = Literal["every", "once"]


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError if `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingOptions:
    """`decoding.*`: The choice of output tokens, and the number of sequences that run together."""

    mode: Mode = "specextend"
    """`specextend` uses attention and cache as configured; `tree` always uses dense tree attention and the full cache;
    `autoregressive` loads no draft and decodes one token per step."""
    max_new_tokens: int = 256
    """Most output tokens of a document."""
    temperature: float = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0 keeps all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to this; 1 keeps all."""
    seed: int = 0
    """Seed of the run. The seed of a document is derived from it and the document's id."""
    stop: tuple[str, ...] = ()
    """Strings that end an output. They are matched across token borders and are not part of the summary."""
    stop_repetition: bool = False
    """End an output once it is a loop: a stretch of up to 64 tokens, at least four times in a row, over at least 64
    tokens. What there is of the loop stays in the summary, and its `finish_reason` is `repetition`."""
    max_batch_size: int = 1
    """Most sequences that a worker decodes together."""
    cache_gib: float = 2.0
    """Largest size of the target's KV cache on each worker, in GiB. The caches of a draft come on top."""

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
    """`attention.*`: The attention kernels, and the kind of tree attention."""

    backend: Literal["auto", "reference", "sdpa", "flash"] = "auto"
    """`reference` is plain torch in float32; `sdpa` is torch's own flash kernels; `flash` is the flash-attn package, an
    extra. `auto` takes the fastest one that is proven on the device: `sdpa` on a CPU, `reference` on a GPU."""
    tree: Literal["auto", "dense", "hybrid"] = "auto"
    """`hybrid` runs an unmasked kernel call over the prefix and a masked one over the tree, and merges both by their
    log-sum-exp (arXiv 2505.20776, section 3); `dense` runs one masked call over everything; `auto` takes in each step
    the one that was faster at these lengths when both were measured at start-up."""

    def __post_init__(self) -> None:
        one_of("attention.backend", self.backend, ("auto", "reference", "sdpa", "flash"))
        one_of("attention.tree", self.tree, ("auto", "dense", "hybrid"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeOptions:
    """`tree.*`: The size of draft trees, which are grown as in OPT-Tree (arXiv 2406.17276)."""

    nodes: int | Literal["auto"] = 16
    """Draft tokens verified in one step; the root is not counted. `auto` chooses the number that brings most tokens per
    second by measured step times, and takes plain steps where no tree pays; in mode `tree` it is `max_nodes`."""
    max_nodes: int = 15
    """Most draft tokens of a step if `nodes` is `auto`. A forward pass has one row more, the root."""
    depth: int = 6
    """Most levels of a draft's own tree."""
    ngram_depth: int = 16
    """Most levels of n-gram drafts, with `draft.kind: ngram` or `draft.ngram: true`."""
    threshold: float = 0.05
    """Stop growing a tree when a level adds less than this to the expected number of accepted tokens. Used on a CPU
    only: on a GPU every tree grows to its full depth."""

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
        """Return the largest number of draft tokens of one step, whatever `nodes` is."""
        return self.max_nodes if isinstance(self.nodes, str) else self.nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """`cache.*`: The part of the text that a draft may see (arXiv 2505.20776, section 3). N-gram drafts see it all."""

    policy: Policy = "retrieval"
    """`full` shows the draft every token; `streaming` shows the first and the most recent chunks; `retrieval` shows the
    first chunks, the most recent ones and those that the target attends to most."""
    chunk_size: int = 32
    """Tokens in a chunk."""
    top_k_chunks: int = 32
    """Chunks that the draft sees under `streaming` and `retrieval`, those of `sinks` and `recent` included."""
    sinks: int = 32
    """Tokens at the start of the text that stay visible, rounded up to whole chunks."""
    recent: int = 128
    """Tokens at the end of the text that stay visible under `retrieval`, rounded up to whole chunks."""
    refresh: Refresh = "every"
    """`once` lets `retrieval` choose chunks after prefill only, `every` after prefill and then every `refresh_every`
    steps."""
    refresh_every: int = 32
    """Steps between two retrievals."""
    draft_prefill_window: int = 512
    """Tokens that a draft of kind `model` attends back to while it reads the prompt."""
    score_layers: tuple[int, ...] = (-1,)
    """Layers of the target whose attention scores the chunks, counted from 0, or from the last one back if negative. Of
    several layers the mean is taken."""

    def __post_init__(self) -> None:
        one_of("cache.policy", self.policy, ("full", "streaming", "retrieval"))
        one_of("cache.refresh", self.refresh, ("every", "once"))
        for name, least in (("chunk_size", 1), ("top_k_chunks", 1), ("sinks", 0), ("recent", 1)):
            at_least(f"cache.{name}", getattr(self, name), least)
        at_least("cache.refresh_every", self.refresh_every, 1)
        at_least("cache.draft_prefill_window", self.draft_prefill_window, 1)
        if not self.score_layers:
            raise ValueError("cache.score_layers must name at least one layer; -1 is the last one")
        # The end of the text may be aligned in any way: two tokens can touch two chunks.
        forced = -(-self.sinks // self.chunk_size) + -(-(self.recent - 1) // self.chunk_size) + 1
        if self.policy == "retrieval" and self.top_k_chunks < forced:
            raise ValueError(
                f"cache.top_k_chunks is {self.top_k_chunks} but cache.sinks and cache.recent alone can take {forced}; "
                "raise it, or lower those"
            )
