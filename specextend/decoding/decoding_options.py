"""The options `decoding.*`, `attention.*`, `tree.*`, `cache.*` and `draft.*`. Frozen, checked when
they are made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from specextend.core import SamplingParams

Mode = Literal["autoregressive", "tree", "specextend"]
Policy = Literal["full", "streaming", "retrieval"]
DraftKind = Literal["eagle", "model", "ngram"]
Backend = Literal["auto", "reference", "sdpa", "compiled", "flash", "triton"]


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError if `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """`decoding.*`: How output tokens are chosen, and how many sequences run together."""

    mode: Mode = "specextend"
    """`specextend` uses attention and cache as configured; `tree` dense tree attention and the
    full cache; `autoregressive` loads no draft and decodes one token a step."""
    max_new_tokens: int = 256
    """Maximum number of output tokens of a document."""
    temperature: float = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0 keeps all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities sum to this; 1 keeps
    all."""
    seed: int = 0
    """Seed of the run; that of a document follows from it and the id."""
    stop: tuple[str, ...] = ()
    """Strings that end an output, also across token borders, and are not part of it."""
    stop_repetition: bool = False
    """End an output that is a loop: a span of up to 64 tokens, at least four times in a row, over
    at least 64 tokens. The loop stays in the text, and `finish_reason` is `repetition`."""
    repetition_penalty: float | None = None
    """Divide the positive logits of tokens that occurred by this and multiply the negative ones,
    as transformers does; 1 changes nothing. The end of sequence, which chat templates contain,
    counts too. Unset: what the model's `generation_config.json` asks, as for the next key."""
    no_repeat_ngram_size: int | None = None
    """Choose no token that would complete a run of so many tokens that occurred before, as in
    transformers; 0 allows all. The prompt counts too, so no long name of the document can be
    quoted."""
    max_batch_size: int | Literal["auto"] = 1
    """Most sequences that a worker decodes together; fewer run where the cache has no room. `auto`
    is the number of documents of mean length that the cache holds, at most 8 on a CPU and 32 on a
    GPU."""
    cache_gib: float = 2.0
    """Largest size of the target's KV cache on each worker, in GiB; a draft's caches are
    additional. With `max_batch_size: auto` it is what a GPU of this machine has left, if that
    is less."""

    def __post_init__(self) -> None:
        at_least("decoding.max_new_tokens", self.max_new_tokens, 1)
        if self.max_batch_size != "auto":
            at_least("decoding.max_batch_size", self.max_batch_size, 1)
        if self.cache_gib <= 0:
            raise ValueError(f"decoding.cache_gib must be above 0, got {self.cache_gib}")
        try:
            self.sampling(self.seed)
        except ValueError as error:
            raise ValueError(f"decoding.{error}") from None

    def sampling(self, seed: int) -> SamplingParams:
        """Return how the tokens of a request with this seed are chosen."""
        names = (each.name for each in fields(SamplingParams) if hasattr(self, each.name))
        return SamplingParams(**{name: getattr(self, name) for name in names} | {"seed": seed})

    @property
    def batch_size(self) -> int:
        """Return `max_batch_size` once it is a number: a start and `load_engine` replace `auto`
        first.
        """
        assert isinstance(self.max_batch_size, int)
        return self.max_batch_size


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """`attention.*`: The attention kernels, and how draft trees attend."""

    backend: Backend = "auto"
    """`auto` takes on a CPU `compiled` where it can be made and is right, else `sdpa`; on a GPU
    the fast kernels of such a card, once proven right at the first start, else `sdpa`.
    `reference` is plain torch in float32, for tests; `sdpa` torch's own; `compiled` (CPU,
    extra `cpu`) and `triton` (GPU, heads of 64 or 128, with CUDA graphs) are ours; `flash` (GPU,
    extra `flash`) is flash-attn 2 or 3. What a kernel cannot do, another does.
    """
    tree: Literal["auto", "dense", "hybrid"] = "auto"
    """`hybrid` attends to prefix and tree in two calls and merges both by their log-sum-exp (arXiv
    2505.20776, section 3), and is never captured; `dense` in one masked call. `auto` is `dense`
    on a CPU and with the Triton kernel, else `hybrid`. It counts for nothing where a CPU runs
    all layers in one call."""


LEAST_SPEEDUP = 0.98
"""How many times as fast as plain decoding documents must be with a draft to go on drafting."""
TRIAL_DOCUMENTS = 16
"""Documents of one worker after which that is decided."""
DECIDED_DOCUMENTS = 200
"""Documents after which it is tried again."""


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """`tree.*`: The size of draft trees, which are grown as in OPT-Tree (arXiv 2406.17276)."""

    ngram_depth: ClassVar[int] = 16  # levels of n-gram drafts, which take no time

    nodes: int | Literal["auto"] = 16
    """Draft tokens verified in one step, without the root. `auto` chooses the number that gives
    the most tokens a second by measured step times, and plain steps where no tree pays; a worker
    whose drafts lose drafts no more for 200 documents. In mode `tree` it is `max_nodes`."""
    max_nodes: int = 15
    """Most draft tokens of a step if `nodes` is `auto`; a forward has one row more, the root."""
    depth: int = 6
    """Levels of a draft's own tree at most; n-gram drafts have up to 16."""
    threshold: float = 0.05
    """Stop growing a tree when a level adds less than this to the expected number of accepted
    tokens. If `nodes` is `auto`, an EAGLE head or small LM only begins with it. Not used where
    steps are replayed: there trees have one of three shapes."""

    def __post_init__(self) -> None:
        at_least("tree.max_nodes", self.max_nodes, 1)
        at_least("tree.nodes", self.most_nodes, 1)
        at_least("tree.depth", self.depth, 1)
        at_least("tree.threshold", self.threshold, 0)

    @property
    def most_nodes(self) -> int:
        """Return the largest number of draft tokens of one step, whatever `nodes` is."""
        return self.max_nodes if isinstance(self.nodes, str) else self.nodes

    @property
    def captured(self) -> list[TreeOptions]:
        """Return the trees that captured drafts choose from, the largest first: each has half the
        nodes of the one before, and fewer levels.
        """
        halved = [(self.most_nodes >> k, self.depth - k * self.depth // 4) for k in range(3)]
        return [replace(self, nodes=nodes, depth=depth) for nodes, depth in halved if nodes]


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """`cache.*`: The part of the text that a draft may see (arXiv 2505.20776, section 3). N-gram
    drafts see it all.
    """

    policy: Policy = "retrieval"
    """`full` shows the draft every token; `streaming` the first and the most recent chunks;
    `retrieval` those and the ones that the target attends to most."""
    chunk_size: int = 32
    """Tokens in a chunk. The first chunk of a text stays visible."""
    top_k_chunks: int = 32
    """Chunks that the draft sees under `streaming` and `retrieval`, the first one and those of
    `recent` included.
    """
    recent: int = 128
    """Tokens at the end of the text that stay visible under `retrieval`, rounded up to whole
    chunks.
    """
    refresh_every: int | Literal["auto"] = "auto"
    """Steps between two retrievals; the first one follows prefill. `auto` is 32; for a small LM,
    once its reading was measured, new chunks take 2% of the time."""
    score_layers: tuple[int, ...] = ()
    """Layers of the target whose attention scores the chunks, counted from 0, or from the last one
    (-1). They must attend to the whole text. Scores of several layers are averaged. Empty: the last
    such layer."""

    def __post_init__(self) -> None:
        for name in ("chunk_size", "top_k_chunks", "recent", "refresh_every"):
            if (value := getattr(self, name)) != "auto":
                at_least(f"cache.{name}", value, 1)
        # The end of the text may be aligned in any way: two tokens can touch two chunks.
        forced = -(-(self.recent - 1) // self.chunk_size) + 2
        if self.policy == "retrieval" and self.top_k_chunks < forced:
            raise ValueError(
                f"cache.top_k_chunks is {self.top_k_chunks} but the first chunk and cache.recent "
                f"alone can take {forced}; raise it, or lower cache.recent"
            )


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """`draft.*`: The draft, which proposes the tree. It runs in the target's dtype and on the
    target's device.

    The section may be left out with `decoding.mode: autoregressive`.
    """

    kind: DraftKind
    """`eagle` is a head over the target's hidden states; `model` a small causal LM with the
    target's tokens, of which either may lack some; `ngram` proposes what followed the same
    tokens earlier, and needs no model."""
    model: str = ""
    """A name as in `target.model`; empty for `ngram`. `specextend prepare draft` converts heads
    that are published as pickles."""
    ngram: bool = False
    """Merge n-gram drafts into the trees of another draft where they are likelier to be
    accepted."""
    feature_layers: tuple[int, ...] = ()
    """For an EAGLE-3 head: the target's layers whose outputs it takes, ascending from 0; empty: by
    its `config.json`."""

    def __post_init__(self) -> None:
        if self.feature_layers and self.kind != "eagle":
            raise ValueError(
                f"draft.feature_layers must not be set with draft.kind {self.kind}: leave it out"
            )
        if "://" in self.model:  # not repeated: an address may hold a token
            raise ValueError("draft.model must be a Hub id or a local path, not an address")
        if self.kind != "ngram" and not self.model:
            raise ValueError(f"draft.model must not be empty with draft.kind {self.kind}")
        for name, empty in (("model", "'\"\"'"), ("ngram", "false")):
            if self.kind == "ngram" and getattr(self, name):
                raise ValueError(
                    f"draft.{name} must not be set with draft.kind ngram, which has no model: "
                    f"leave it out, or --set draft.{name}={empty}"
                )

    @property
    def has_ngrams(self) -> bool:
        """Return True if n-gram drafts are proposed, alone or merged."""
        return self.kind == "ngram" or self.ngram
