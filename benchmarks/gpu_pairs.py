"""Pairs of target and draft with random weights, made on the device without any files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from specextend.attention.backends import load_backend, load_layer_kernels
from specextend.attention.plan import Attend, TreeAttention
from specextend.decoding.cache import aligned
from specextend.decoding.decoding_options import CacheOptions, TreeOptions
from specextend.decoding.device import CudaCapture, Graphs, traits_of
from specextend.decoding.engine import Engine
from specextend.decoding.model import CachedModel
from specextend.drafters.causal import CausalDrafter, DraftNetwork
from specextend.drafters.eagle_network import EagleNetwork, HeadShape
from specextend.drafters.lm_networks import ModelNetwork
from specextend.models.causal_lm import rope_frequencies


class SkippedError(Exception):
    """A combination that this machine cannot run; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairShape:
    """Shapes of a target and its draft."""

    name: str
    target: Mapping[str, Any]
    """Arguments of LlamaConfig."""
    draft: Mapping[str, Any] | None
    """Arguments of LlamaConfig for a small model; None: an EAGLE-3 head as wide as the target."""
    tree: TreeOptions
    cache: CacheOptions


def _llama(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], vocabulary: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 65536,
        "bos_token_id": None,
        "eos_token_id": None,
    }


_TREE = TreeOptions(nodes=50, depth=10)
FULL = (
    PairShape(
        name="Vicuna-7B + 68M",
        target=_llama(4096, 11008, 32, (32, 32), 32000),
        draft=_llama(768, 3072, 2, (12, 12), 32000),
        tree=_TREE,
        cache=CacheOptions(),
    ),
    PairShape(
        name="Llama-3.1-8B + EAGLE-3",
        target=_llama(4096, 14336, 32, (32, 8), 128256),
        draft=None,
        tree=_TREE,
        cache=CacheOptions(),
    ),
)
_TINY_TARGET = _llama(128, 192, 8, (4, 2), 500) | {"head_dim": 64, "initializer_range": 0.2}
_TINY: dict[str, Any] = {
    "target": _TINY_TARGET,
    "tree": TreeOptions(nodes=8, depth=4),
    "cache": CacheOptions(
        chunk_size=8, top_k_chunks=8, recent=16, refresh_every=3, score_layers=(-1, 2)
    ),
}
TINY = (
    PairShape(name="tiny + model", draft=_TINY_TARGET, **_TINY),
    PairShape(name="tiny + EAGLE-3", draft=None, **_TINY),
)
"""Heads of 64 elements, supported by every kernel."""
_HEAD_VOCABULARY = 32000
"""Maximum vocabulary of an EAGLE-3 head."""


class Pair:
    """A target and a draft of a shape, on a device."""

    def __init__(self, shape: PairShape, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.model = random_llama(shape.target, device, dtype)
        self.draft_model: Any = None
        self.head: HeadShape | None = None
        self.head_weights: dict[str, Tensor] = {}
        if shape.draft is None:
            self.head = _describe_head(self.model.config)
            self.head_weights = _random_weights(self.head, self.model)
        else:
            self.draft_model = random_llama(shape.draft, device, dtype)
            if shape.draft == shape.target:
                _imitate(self.draft_model, self.model)

    def to(self, device: torch.device) -> Pair:
        """Return a copy on another device."""
        moved = copy.copy(self)
        moved.model, moved.draft_model = (
            None if model is None else copy.deepcopy(model).to(device)
            for model in (self.model, self.draft_model)
        )
        moved.head_weights = {name: weight.to(device) for name, weight in self.head_weights.items()}
        return moved


GRAPHS = "triton, graphs"
"""Engine mode with captured steps; other modes are names of attention backends."""


class EngineParts:
    """The engine's target and drafter for a batch of equally long sequences."""

    def __init__(self, pair: Pair, backend: str, batch: int, num_tokens: int) -> None:
        shape, model = pair.shape, _own(pair.model)
        name = backend.partition(",")[0]
        self.graphs = _graphs(model.device) if backend == GRAPHS else Graphs()
        self.shape, self.batch, self.num_tokens = shape, batch, num_tokens
        self.lm_head: Tensor = model.lm_head.weight  # packing hides it
        rows = aligned(num_tokens + shape.tree.most_drafts + shape.tree.depth + 2)
        attend = require_backend(name, model.device)
        self.target = CachedModel(
            model, attend, batch * rows, load_layer_kernels(name, model.device)
        )
        self.tree_attention: TreeAttention = "dense" if name == "triton" else "hybrid"
        self.chunk_size = traits_of(model.device).prefill_chunk
        scratch = shape.tree.most_drafts * shape.tree.depth
        self.network = self._network(pair, batch * (rows + aligned(scratch)))
        visible = shape.cache.top_k_chunks * shape.cache.chunk_size
        self.drafter = CausalDrafter(self.network, shape.tree, "dense", visible, batch, self.graphs)

    def engine(self, *, speculates: bool) -> Engine:
        """Make an engine; without speculation it decodes a token per step."""
        return Engine(
            TokenNumbers(),
            self.target,
            self.drafter if speculates else None,
            eos_token_ids=frozenset(),
            max_tokens=self.num_tokens,
            max_batch_size=self.batch,
            tree=self.shape.tree,
            tree_attention=self.tree_attention,
            cache=self.shape.cache,
            graphs=self.graphs,
        )

    def _network(self, pair: Pair, num_rows: int) -> DraftNetwork:
        target = self.target
        if pair.head is None:
            cached = CachedModel(_own(pair.draft_model), target.attend, num_rows, target.kernels)
            return ModelNetwork(cached, self.shape.cache.chunk_size, self.chunk_size)
        rope = rope_frequencies({}, pair.head.head_dim, pair.head.format)
        layers = pair.head.hidden_layers(target.config.num_hidden_layers)
        vocabulary = torch.arange(pair.head.draft_vocab_size)
        rows = num_rows, num_rows
        return EagleNetwork(
            pair.head, pair.head_weights, vocabulary, target, self.lm_head, rows, rope, layers
        )


class TokenNumbers:
    """A tokenizer with numbers as tokens."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, token_ids: list[int], **_: bool) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(map(str, token_ids))


def _graphs(device: torch.device) -> Graphs:
    if device.type != "cuda":
        raise SkippedError("steps are captured on a GPU only")
    return Graphs(CudaCapture())


def require_backend(name: str, device: torch.device) -> Attend:
    """Return an attention backend. Raises SkippedError for unsupported devices."""
    try:
        return load_backend(name, device)
    except ValueError as error:
        raise SkippedError(str(error)) from None


def random_llama(values: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Make a random Llama on a device."""
    config = LlamaConfig(**values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def _own(model: Any) -> Any:
    """Return a copy with replaceable layers; the weights are shared."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def _imitate(draft: Any, target: Any) -> None:
    """Give a draft the target's weights with noise, so that some guesses are wrong."""
    draft.load_state_dict(target.state_dict())
    for weight in draft.parameters():
        weight.add_(torch.randn_like(weight) * weight.std() * 0.02)


def _describe_head(config: Any) -> HeadShape:
    return HeadShape(
        folder=Path(),
        format="EAGLE-3",
        fused=True,
        vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        layer_eps=config.rms_norm_eps,
        head_eps=config.rms_norm_eps,
        rope={},
        draft_vocab_size=min(_HEAD_VOCABULARY, config.vocab_size // 2),
    )


def _random_weights(head: HeadShape, model: Any) -> dict[str, Tensor]:
    made = {"device": model.device, "dtype": model.dtype}
    std = model.config.initializer_range
    return {
        name: torch.ones(size, **made) if len(size) == 1 else torch.randn(size, **made) * std
        for name, size in head.required().items()
        if name != "d2t"
    }
