"""From a configuration to an engine."""

from __future__ import annotations

from safetensors.torch import load_file
from torch import Tensor

from specextend.attention.hf import IMPLEMENTATION
from specextend.attention.hybrid import load_backend
from specextend.config import RunConfig
from specextend.decoding.cache import aligned
from specextend.decoding.drafter import Drafter
from specextend.decoding.engine import PREFILL_CHUNK, Engine
from specextend.decoding.model import CachedModel
from specextend.decoding.options import CacheOptions
from specextend.decoding.retrieval import scored_layers
from specextend.decoding.tuning_file import load_step_costs
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.eagle import EagleNetwork
from specextend.drafters.eagle_config import WEIGHTS_FILE, load_eagle_config
from specextend.drafters.formats import is_ours, read_head
from specextend.drafters.merged import MergedDrafter
from specextend.drafters.model import ModelNetwork
from specextend.drafters.network import DraftNetwork
from specextend.drafters.ngram import NgramDrafter
from specextend.drafters.options import DraftOptions
from specextend.drafters.published import PublishedNetwork
from specextend.models import ModelFacts, load_causal_lm, load_target, load_tokenizer, rope_frequencies
from specextend.pairing import check_pair, reduced_vocabulary

GIB = 1024**3


def load_engine(config: RunConfig) -> Engine:
    """The models of a configuration, ready to decode.

    `decoding.mode` decides what is used of it: `tree` runs dense tree attention and the full cache whatever the
    configuration says, `autoregressive` loads no draft.

    Raises:
        ValueError: a model that cannot be found or served, or a draft that does not fit its target.
    """
    facts = check_pair(config.target, None if config.decoding.mode == "autoregressive" else config.draft)
    scored_layers(config.cache, facts.num_layers)
    num_rows = target_rows(config, facts)
    target, lm_head = load_cached_target(config, num_rows)
    cache, drafter = config.cache, None
    if config.decoding.mode == "tree" or (config.draft is not None and config.draft.kind == "ngram"):
        cache = CacheOptions(policy="full", draft_prefill_window=config.cache.draft_prefill_window)
    if config.decoding.mode != "autoregressive":
        drafter = load_drafter(config, cache, target, lm_head, num_rows)
    costs = None
    if config.decoding.mode == "specextend":
        costs = load_step_costs(target, config.tree, config.attention, config.decoding.max_batch_size)
    tree_attention = "dense" if config.decoding.mode == "tree" else config.attention.tree
    return Engine(
        load_tokenizer(config.target.model, config.target.revision),
        target,
        drafter,
        eos_token_ids=frozenset(facts.eos_token_ids),
        max_tokens=config.max_tokens(facts.context_length),
        max_batch_size=config.decoding.max_batch_size,
        tree=config.tree,
        tree_attention=tree_attention if tree_attention != "auto" or costs else "hybrid",
        cache=cache,
        costs=costs,
    )


def rows_per_sequence(config: RunConfig, num_tokens: int) -> int:
    """Cache rows of a sequence of `num_tokens` tokens: its own, a tree behind them, aligned."""
    return aligned(num_tokens + config.tree.most_nodes + config.num_tree_levels + 2)


def target_rows(config: RunConfig, facts: ModelFacts) -> int:
    """Rows of the target's cache: what `decoding.cache_gib` holds, but not more than a full batch can use."""
    affordable = int(config.decoding.cache_gib * GIB) // facts.kv_bytes_per_token(config.target.dtype)
    return min(affordable, config.decoding.max_batch_size * rows_per_sequence(config, facts.context_length))


def load_cached_target(config: RunConfig, num_rows: int) -> tuple[CachedModel, Tensor]:
    """The target with `num_rows` rows of cache, and the weight [V, C] of its LM head, which packing hides in it."""
    model = load_target(config.target, IMPLEMENTATION)
    lm_head = model.get_output_embeddings().weight
    return CachedModel(model, load_backend(config.attention.backend, model.device), num_rows), lm_head


def load_drafter(
    config: RunConfig, cache: CacheOptions, target: CachedModel, lm_head: Tensor, num_rows: int
) -> Drafter:
    """The drafter that `draft.kind` and `draft.ngram` name, with caches that hold what the target's holds."""
    assert config.draft is not None, "the configuration asks for a draft in every mode but autoregressive"
    if config.draft.kind == "ngram":
        return NgramDrafter(config.tree, target.device)
    drafter = _load_causal(config, config.draft, cache, target, lm_head, num_rows)
    return MergedDrafter(drafter, config.tree, target.device) if config.draft.ngram else drafter


def _load_causal(
    config: RunConfig, draft: DraftOptions, cache: CacheOptions, target: CachedModel, lm_head: Tensor, num_rows: int
) -> CausalDrafter:
    """The drafter around a draft network."""
    scratch = aligned(config.tree.most_nodes * config.num_tree_levels + cache.draft_prefill_window + PREFILL_CHUNK)
    num_working_rows = num_rows + config.decoding.max_batch_size * scratch
    network: DraftNetwork
    if draft.kind == "eagle":
        load = _load_eagle if is_ours(draft.model) else _load_published
        network = load(draft.model, target, lm_head, num_working_rows)
    else:
        device = str(target.device)
        model = load_causal_lm(draft.model, draft.revision, config.target.dtype, device, IMPLEMENTATION)
        cached = CachedModel(model, target.attend, num_working_rows)
        reduced = reduced_vocabulary(draft)
        network = ModelNetwork(cached, num_working_rows, cache.draft_prefill_window, PREFILL_CHUNK, reduced)
    visible = None if cache.policy == "full" else cache.top_k_chunks * cache.chunk_size
    tree_attention = "dense" if config.decoding.mode == "tree" else config.attention.tree
    if tree_attention == "auto":  # what a draft sees is short, but for `full`
        tree_attention = "hybrid" if visible is None else "dense"
    return CausalDrafter(network, config.tree, tree_attention, visible)


def _load_eagle(folder: str, target: CachedModel, lm_head: Tensor, num_rows: int) -> EagleNetwork:
    eagle_config = load_eagle_config(folder)
    weights = load_file(f"{folder}/{WEIGHTS_FILE}", device=str(target.device))
    cast = {name: weight.to(target.dtype) if weight.is_floating_point() else weight for name, weight in weights.items()}
    return EagleNetwork(eagle_config, cast, target, lm_head, num_rows)


def _load_published(folder: str, target: CachedModel, lm_head: Tensor, num_rows: int) -> PublishedNetwork:
    head = read_head(folder)
    rope = rope_frequencies(head.rope, head.head_dim, folder)
    hidden_layers = head.hidden_layers(target.config.num_hidden_layers)
    return PublishedNetwork(head, target, lm_head, num_rows, rope, hidden_layers)
