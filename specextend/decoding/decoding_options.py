"""The options `decoding.*`, `attention.*`, `tree.*`, `cache.*` and `draft.*`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from specextend.core import SamplingParams

Mode = Literal["autoregressive", "tree", "specextend"]
Policy = Literal["full", "streaming", "retrieval"]
DraftKind = Literal["eagle", "model", "mtp", "ngram"]
Backend = Literal["auto", "reference", "sdpa", "compiled", "flash", "triton"]


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError if `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """`decoding.*`: Choice of output tokens, and size of a batch."""

    mode: Mode = "specextend"
    """`specextend`: attention and cache as configured. `tree`: dense tree attention and the full
    cache. `autoregressive`: no draft, one token a step.
    """
    max_new_tokens: int = 256
    """Most output tokens of a document."""
    temperature: float = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens up to this sum of probabilities; 1 keeps all."""
    seed: int = 0
    """Seed of the run. The seed of a document follows from it and the id."""
    stop: tuple[str, ...] = ()
    """Strings that end an output, also across token borders. The output leaves them out."""
    stop_repetition: bool = False
    """End an output at a loop: a span of up to 64 tokens, at least four times in a row, over at
    least 64 tokens. The loop stays in the text, and `finish_reason` is `repetition`.
    """
    repetition_penalty: float | None = None
    """Divide positive logits of earlier tokens by this and multiply negative ones, as transformers
    does; 1 changes nothing. The end of sequence counts too, since chat templates contain it. Unset:
    the value in the model's `generation_config.json`, as for the next key.
    """
    no_repeat_ngram_size: int | None = None
    """Never repeat a run of this many tokens, as in transformers; 0 allows all. Runs of the prompt
    count too, so no long name of the document can be quoted.
    """
    max_batch_size: int | Literal["auto"] = 1
    """Most sequences in a step of a worker; fewer run if the cache has no room. `auto`: as many
    documents of mean length as the cache holds, at most 8 on a CPU and 32 on a GPU.
    """
    cache_gib: float = 2.0
    """Largest size of the target's KV cache on each worker, in GiB. A draft's caches are
    additional. With `max_batch_size: auto` the rest of this machine's GPU is the limit too.
    """

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
        """Return the sampling parameters of a request."""
        names = (each.name for each in fields(SamplingParams) if hasattr(self, each.name))
        return SamplingParams(**{name: getattr(self, name) for name in names} | {"seed": seed})

    @property
    def batch_size(self) -> int:
        """`max_batch_size` as a number, after `auto` was replaced."""
        assert isinstance(self.max_batch_size, int)
        return self.max_batch_size


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """`attention.*`: Attention kernels, and attention of draft trees."""

    backend: Backend = "auto"
    """`auto`: on a CPU `compiled` if it can be made and is right; on a GPU the fast kernels of the
    card after a proof at the first start; otherwise `sdpa`. `reference`: plain torch in float32,
    for tests. `sdpa`: torch's kernels. `compiled` (CPU, extra `cpu`) and `triton` (GPU, heads of 64
    or 128, with CUDA graphs): our kernels. `flash` (GPU, extra `flash`): flash-attn 2 or 3. Another
    kernel takes calls that the chosen kernel does not support.
    """
    tree: Literal["auto", "dense", "hybrid"] = "auto"
    """`hybrid`: attention to prefix and tree in two calls, merged by their log-sum-exp (arXiv
    2505.20776, section 3), never captured. `dense`: a single masked call. `auto`: `dense` on a CPU
    and with the Triton kernel, otherwise `hybrid`. Unused if a CPU runs all layers in one call. In
    bfloat16 two calls round twice, so near ties may differ from plain decoding.
    """


LEAST_SPEEDUP = 0.98
"""Least speed of documents with a draft over plain decoding, to go on drafting."""
TRIAL_DOCUMENTS = 16
"""Documents of a worker before this decision."""
DECIDED_DOCUMENTS = 200
"""Documents before the next trial."""


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """`tree.*`: Size of draft trees, grown as in OPT-Tree (arXiv 2406.17276)."""

    ngram_depth: ClassVar[int] = 16
    """Levels of n-gram drafts."""

    nodes: int | Literal["auto"] = 16
    """Draft tokens of a step, without the root. `auto`: the number with most tokens a second by
    measured step times, or plain steps if no tree pays. A worker with losing drafts stops drafting
    for 200 documents. In mode `tree`, `auto` is `max_nodes`.
    """
    max_nodes: int = 15
    """Most draft tokens of a step with `nodes: auto`."""
    depth: int = 6
    """Most levels of a draft's tree; n-gram drafts have up to 16."""
    threshold: float = 0.05
    """Least expected accepted tokens of another level. With `nodes: auto` an EAGLE head or small LM
    begins with this value and adapts it. Unused in captured steps, whose trees have one of three
    shapes.
    """

    def __post_init__(self) -> None:
        at_least("tree.max_nodes", self.max_nodes, 1)
        at_least("tree.nodes", self.most_drafts, 1)
        at_least("tree.depth", self.depth, 1)
        at_least("tree.threshold", self.threshold, 0)

    @property
    def most_drafts(self) -> int:
        """Most draft tokens of a step."""
        return self.max_nodes if isinstance(self.nodes, str) else self.nodes

    @property
    def captured(self) -> list[TreeOptions]:
        """Return the trees of captured drafts, the largest first. Each halves the draft tokens."""
        halved = [(self.most_drafts >> k, self.depth - k * self.depth // 4) for k in range(3)]
        return [replace(self, nodes=nodes, depth=depth) for nodes, depth in halved if nodes]


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """`cache.*`: Visible part of the text for a draft (arXiv 2505.20776, section 3). N-gram drafts
    see all of it.
    """

    policy: Policy = "retrieval"
    """`full`: all tokens. `streaming`: first and most recent chunks. `retrieval`: these, and chunks
    with most of the target's attention.
    """
    chunk_size: int = 32
    """Tokens in a chunk. The first chunk of a text stays visible."""
    top_k_chunks: int = 32
    """Visible chunks with `streaming` and `retrieval`, first and recent chunks included."""
    recent: int = 128
    """Visible tokens at the end of the text with `retrieval`, rounded up to whole chunks."""
    refresh_every: int | Literal["auto"] = "auto"
    """Steps between two retrievals; the first retrieval follows prefill. `auto`: 32, or for a small
    LM so many that reading new chunks takes 2% of the time.
    """
    score_layers: tuple[int, ...] = ()
    """Layers of the target that score chunks by their attention, from 0 on, or from the last layer
    (-1) down. They must attend to the whole text. Scores of several layers are averaged. Empty: the
    last layer of full attention.
    """

    def __post_init__(self) -> None:
        for name in ("chunk_size", "top_k_chunks", "recent", "refresh_every"):
            if (value := getattr(self, name)) != "auto":
                at_least(f"cache.{name}", value, 1)
        # at an unaligned end two tokens can touch two chunks
        forced = -(-(self.recent - 1) // self.chunk_size) + 2
        if self.policy == "retrieval" and self.top_k_chunks < forced:
            raise ValueError(
                f"cache.top_k_chunks is {self.top_k_chunks} but the first chunk and cache.recent "
                f"alone can take {forced}; raise it, or lower cache.recent"
            )


NOT_TAKEN: dict[str, tuple[str, ...]] = {"ngram": ("model", "ngram"), "mtp": ("model",)}
"""Keys of the draft's section that a kind does not take."""
_EMPTY = {"model": "'\"\"'", "ngram": "false"}
"""Values of these keys that say nothing, as a shell takes them."""


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """`draft.*`: The draft, in the target's dtype and on its device.

    Optional with `decoding.mode: autoregressive`.
    """

    kind: DraftKind
    """`eagle`: a head over the target's hidden states. `model`: a small causal LM with the target's
    tokens; either may lack some. `mtp`: the layer for the token after the next in the target's
    checkpoint (Qwen3.5, GLM-4.x, DeepSeek-V3). `ngram`: repeats of earlier text, without a model.
    """
    model: str = ""
    """A name as in `target.model`; empty for `mtp` and `ngram`. `specextend prepare draft` converts
    heads in pickles.
    """
    ngram: bool = False
    """Merge likelier n-gram drafts into the trees of another draft."""
    feature_layers: tuple[int, ...] = ()
    """For an EAGLE-3 head: layers of the target with the outputs for its features, ascending from
    0. Empty: by its `config.json`.
    """

    def __post_init__(self) -> None:
        if self.feature_layers and self.kind != "eagle":
            raise ValueError(
                f"draft.feature_layers must not be set with draft.kind {self.kind}: leave it out"
            )
        if "://" in self.model:  # not repeated: an address may hold a token
            raise ValueError("draft.model must be a Hub id or a local path, not an address")
        not_taken = NOT_TAKEN.get(self.kind, ())
        if not self.model and "model" not in not_taken:
            raise ValueError(f"draft.model must not be empty with draft.kind {self.kind}")
        for name in not_taken:
            if getattr(self, name):
                where = "is in the target's checkpoint" if self.kind == "mtp" else "has no model"
                raise ValueError(
                    f"draft.{name} must not be set with draft.kind {self.kind}, which {where}: "
                    f"leave it out, or --set draft.{name}={_EMPTY[name]}"
                )

    @property
    def is_head(self) -> bool:
        """Return True if the draft reads the target's hidden states."""
        return self.kind in ("eagle", "mtp")

    @property
    def has_ngrams(self) -> bool:
        """Return True if n-grams draft, alone or merged."""
        return self.kind == "ngram" or self.ngram
