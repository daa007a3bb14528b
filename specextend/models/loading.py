"""From a configuration to an engine. Begin with `load_engine`."""

import logging
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specextend.attention.plan import TreeAttention
from specextend.config import Configs, RunConfig
from specextend.decoding.cache import ALIGNMENT, RecentSizes, aligned
from specextend.decoding.decoding_options import DraftOptions
from specextend.decoding.device import (
    GRAPH_BYTES,
    MOST_GRAPHS,
    CudaCapture,
    DeviceTraits,
    Graphs,
    compute_capability,
    device_bytes,
    make_current,
    release_cached,
    traits_of,
)
from specextend.decoding.engine import Engine
from specextend.decoding.measurements import load_step_costs
from specextend.decoding.model import CachedModel
from specextend.decoding.recurrent import MOST_KEPT
from specextend.decoding.retrieval import scored_layers
from specextend.decoding.speculation import Adaptive
from specextend.drafters.eagle_network import HeadShape
from specextend.drafters.formats import read_head
from specextend.models.causal_lm import (
    DTYPES,
    ModelFacts,
    load_causal_lm,
    load_tokenizer,
    read_facts,
    target_bytes,
    target_device,
)
from specextend.models.model_files import ModelError, find_folder, read_json
from specextend.models.pairing import (
    check_pair,
    draft_rows,
    draft_size,
    how_trees_attend,
    load_drafter,
)
from specextend.proof.child import random_model, times_of
from specextend.proof.prover import (
    Kernels,
    LayerShape,
    Proof,
    Subject,
    candidates_for,
    load_proof,
)

_log = logging.getLogger(__name__)
GIB = 1024**3
_TRIED_LAYERS = 4
"""More than a processor's caches hold."""
_WIDTH = 16
"""Numbers of a token in a layer's forward, in hidden sizes, for an MLP 3.5 times as wide."""
_EXPERT_WIDTH = 4
"""Numbers for each expert of a token: its input and output, weighted and in order."""
_RECURRENT_WIDTH = 32
"""Numbers of a recurrent layer, which copies its inputs in fp32."""
_GRAPHS_OF_A_BATCH = 11
"""Captured functions for a batch size: three drafts, an absorption, verifications."""
_MEAN_LOGITS = 0.2
"""Mean logits of a step as a share of the largest step's."""
_CAPPED = 4
"""Copies of a key head's scores that attention with a softcap holds."""
_SPARE = 1024
"""Rows beyond the window and a chunk, for another prompt about the same document."""
_PLANNED = 0.95
"""Share of a GPU for a batch of size `auto`."""


def load_engine(config: Configs) -> Engine:
    """Load the models of a configuration into an engine.

    The mode `tree` overrides attention and cache; `autoregressive` loads no draft.

    Raises:
        ValueError: A model is not served, or the draft does not fit the target.
    """
    config = RunConfig.load(config)
    # a missing GPU comes first
    device = target_device(config.target, config.job.device)
    facts = check_pair(config.target, config.active_draft)
    check_verify(config, facts)
    scored_layers(config.cache, facts.layers)
    config = with_batch_size(config, facts, usable_bytes(config))
    check_memory(config, facts)
    num_rows = target_rows(config, facts)
    proof = choose_kernels(config, facts)
    recent = recent_sizes(config, facts)
    target, lm_head = load_cached_target(config, num_rows, proof.kernels, recent)
    target.trials += proof.trials
    graphs = Graphs(CudaCapture() if proof.kernels.graphs else None)
    if config.attention.backend == "auto" and proof.kernels.steps == "triton":
        config = config.model_copy(
            update={"attention": replace(config.attention, backend="triton")}
        )
    tree_attention: TreeAttention = "dense"
    if not target.runs_in_one_call:  # one call attends to prefix and tree apart
        tree_attention = how_trees_attend(config, reads_much=device.type != "cpu")
    drafter = load_drafter(config, target, lm_head, num_rows, graphs)
    adaptive = None
    if config.decoding.mode == "specextend":
        costs = load_step_costs(
            target, config.tree, tree_attention, config.decoding.batch_size, graphs
        )
        if costs is not None:
            captured = [tree.most_drafts for tree in config.tree.captured if graphs.enabled]
            adaptive = Adaptive(costs, config.tree.most_drafts, captured)
    release_cached(device)  # left by checks and joined weights
    return Engine(
        load_tokenizer(config.target.model),
        target,
        drafter,
        eos_token_ids=frozenset(facts.eos_token_ids),
        max_tokens=config.max_tokens(facts.context_length),
        max_batch_size=config.decoding.batch_size,
        tree=config.tree,
        tree_attention=tree_attention,
        cache=config.active_cache,
        adaptive=adaptive,
        graphs=graphs,
        asks=facts.asks,
    )


def check_verify(config: RunConfig, facts: ModelFacts) -> None:
    """Raise ModelError if the target cannot go back to its prompt, as `output.verify` must."""
    if config.output.verify and facts.state_bytes:
        raise ModelError(
            f"output.verify goes back to the prompt, and target {facts.name} has layers with a "
            "recurrent state, which cannot: leave out output.verify"
        )


def can_capture(config: RunConfig) -> bool:
    """Return True if steps may be captured, which needs the Triton kernel."""
    has_triton = (
        config.attention.backend in ("auto", "triton") and config.attention.tree != "hybrid"
    )
    return has_triton and config.job.device == "cuda"


def choose_kernels(config: RunConfig, facts: ModelFacts) -> Proof:
    """Return the named kernels, or with `auto` those proven for a GPU's fused layers."""
    backend = config.attention.backend
    device = torch.device(config.job.device)
    draft = config.active_draft
    is_fused = facts.is_fused and (
        draft is None or draft.kind != "model" or read_facts(draft.model).is_fused
    )
    if backend != "auto" or device.type == "cpu" or not is_fused:
        graphs = backend == "triton" and can_capture(config) and is_fused
        return Proof(Kernels(prompts=backend, steps=backend, layers=backend, graphs=graphs))
    of_card = candidates_for(compute_capability(device))
    candidates = [each for each in of_card if each.field != "graphs" or can_capture(config)]
    return load_proof(make_subject(config, facts), candidates)


def make_subject(config: RunConfig, facts: ModelFacts) -> Subject:
    """Return the shapes to prove kernels for."""
    return Subject(
        device=config.job.device,
        dtype=config.target.dtype,
        layers=tuple(dict.fromkeys((_layer_shape(facts), *_draft_shapes(config.active_draft)))),
        num_drafts=config.tree.most_drafts,
        depth=config.num_tree_levels,
        chunk=_traits(config).prefill_chunk,
        quantize=config.target.quantize,
    )


def _layer_shape(model: ModelFacts | HeadShape) -> LayerShape:
    return LayerShape(
        num_heads=model.num_heads,
        num_key_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        has_norms=isinstance(model, ModelFacts) and model.has_head_norms,
    )


def _draft_shapes(draft: DraftOptions | None) -> list[LayerShape]:
    if draft is None or not draft.model:
        return []
    read = read_head if draft.kind == "eagle" else read_facts
    return [_layer_shape(read(draft.model))]


def _traits(config: RunConfig) -> DeviceTraits:
    return traits_of(torch.device(config.job.device))


def try_kernels(config: RunConfig, *, timed: bool = False) -> tuple[Proof, list[str]]:
    """Prove this machine's kernels as a start does; `timed` adds lines with milliseconds."""
    device = target_device(config.target, config.job.device)
    facts = check_pair(config.target, config.active_draft)
    proof = choose_kernels(config, facts)
    if device.type != "cpu":
        lines = times_of(make_subject(config, facts), proof.kernels) if timed else ()
        return proof, [*lines]
    if not facts.is_fused:
        return proof, []
    config = with_batch_size(config, facts, None)
    model = random_model(
        read_json(find_folder(config.target.model, weights=False) / "config.json"),
        device,
        DTYPES[config.target.dtype],
        num_hidden_layers=min(_TRIED_LAYERS, facts.num_layers),
    )
    target = CachedModel(
        model,
        proof.kernels.attend(device),
        target_rows(config, facts),
        quantize=config.target.quantize,
    )
    if config.attention.backend == "auto":
        target.join_layers()
    return Proof(proof.kernels, target.trials), []


def rows_per_sequence(config: RunConfig, num_tokens: int) -> int:
    """Return the aligned cache rows of a sequence with its tree."""
    return aligned(num_tokens + config.tree.most_drafts + config.num_tree_levels + 2)


def recent_sizes(config: RunConfig, facts: ModelFacts) -> RecentSizes | None:
    """Return the sizes of the cache of layers with a sliding window.

    None if it has the rows of the other layers: there are no such layers, rows of the input may ask
    for longer outputs, or verdicts go back into the prompt.
    """
    if not facts.window or config.input.has_limits or config.verifies:
        return None
    most = config.max_tokens(facts.context_length)
    window = min(facts.window, most)
    reading = min(window + _traits(config).prefill_chunk + _SPARE, most)
    running = min(window + config.most_new_tokens, most)
    return RecentSizes(
        window=window,
        reading=aligned(reading) + ALIGNMENT,
        running=rows_per_sequence(config, running) + ALIGNMENT,
        num_sequences=config.decoding.batch_size,
        most_new_tokens=config.most_new_tokens,
    )


class CacheBytes(NamedTuple):
    """The bytes of the target's cache."""

    of_row: int
    """Bytes of a row in layers with rows for all tokens."""
    of_windows: int
    """Bytes of layers with a window."""
    of_states: int


def cache_bytes(config: RunConfig, facts: ModelFacts) -> CacheBytes:
    """Compute the cache's bytes."""
    recent = recent_sizes(config, facts)
    size = DTYPES[config.target.dtype].itemsize
    # before and after a step, and after chunks of the last prompt
    num_states = 2 * config.decoding.batch_size + MOST_KEPT
    states = num_states * facts.state_bytes
    if recent is None:
        return CacheBytes(facts.kv_numbers_per_token * size, 0, states)
    of_recent = facts.recent_numbers_per_token
    of_row = (facts.kv_numbers_per_token - of_recent) * size
    return CacheBytes(of_row, recent.num_rows * of_recent * size, states)


def target_rows(config: RunConfig, facts: ModelFacts) -> int:
    """Return the rows of `decoding.cache_gib`, or of a full batch."""
    size = cache_bytes(config, facts)
    room = max(0, int(config.decoding.cache_gib * GIB) - size.of_windows)
    usable = config.decoding.batch_size * rows_per_sequence(config, facts.context_length)
    if not size.of_row:
        return usable if room else 0
    return min(room // size.of_row, usable)


def longest_request(config: RunConfig, facts: ModelFacts) -> int:
    """Return the most tokens of a prompt and its output."""
    longest = config.max_tokens(facts.context_length)
    if config.prompt.max_prompt_tokens is None:
        return longest
    return min(longest, config.prompt.max_prompt_tokens + config.most_new_tokens)


def with_batch_size(
    config: RunConfig,
    facts: ModelFacts,
    budget: int | None,
    num_tokens: tuple[int, int] | None = None,
) -> RunConfig:
    """Replace `decoding.max_batch_size: auto` by a number, and fit the cache to it.

    Args:
        budget: Bytes of a worker, if known.
        num_tokens: Mean and most tokens of a request; None: as long as options allow.

    Returns:
        A batch of as many mean requests as the cache holds; of 1 if not even the longest fits.
    """
    if config.decoding.max_batch_size != "auto":
        return config
    mean, longest = (
        rows_per_sequence(config, number)
        for number in num_tokens or [longest_request(config, facts)] * 2
    )
    for size in range(_traits(config).largest_batch, 0, -1):
        sized = _sized(config, max_batch_size=size)
        rows = _rows_within(sized, facts, budget)
        if rows >= max(longest, size * mean):
            held = cache_bytes(sized, facts)
            return _sized(sized, cache_gib=(rows * held.of_row + held.of_windows) / GIB)
    return sized


def _sized(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"decoding": replace(config.decoding, **changes)})


def _rows_within(config: RunConfig, facts: ModelFacts, budget: int | None) -> int:
    rows = target_rows(config, facts)
    if budget is None:
        return rows
    excess = sum(memory_bytes(config, facts).values()) - int(_PLANNED * budget)
    of_draft = [sum(draft_rows(config, each)) for each in (rows, rows + ALIGNMENT)]
    drafts = draft_size(config).num_cached * (of_draft[1] - of_draft[0]) / ALIGNMENT
    size = DTYPES[config.target.dtype].itemsize
    per_row = cache_bytes(config, facts).of_row + drafts * size
    if excess <= 0:
        return rows
    if not per_row:
        return 0
    return (rows - math.ceil(excess / per_row)) // ALIGNMENT * ALIGNMENT


def memory_bytes(config: RunConfig, facts: ModelFacts) -> dict[str, int]:
    """Compute the bytes of a worker from configs and headers.

    `activations` and `workspace` (captured steps) are estimates.
    """
    size = DTYPES[config.target.dtype].itemsize
    num_rows = target_rows(config, facts)
    draft = draft_size(config)
    features = draft.num_layers_read * facts.hidden_size * longest_request(config, facts) * size
    held = cache_bytes(config, facts)
    return {
        "target_weights": target_bytes(config.target, torch.device(config.job.device)),
        "draft_weights": size * draft.num_parameters,
        "target_cache": aligned(num_rows) * held.of_row + held.of_windows + held.of_states,
        "draft_caches": sum(map(aligned, draft_rows(config, num_rows))) * size * draft.num_cached,
        "activations": _forward_bytes(config, facts) + features,
        "workspace": _traits(config).workspace_bytes + _graph_bytes(config, facts),
    }


def _forward_bytes(config: RunConfig, facts: ModelFacts) -> int:
    size = DTYPES[config.target.dtype].itemsize
    chunk = _traits(config).prefill_chunk
    width = _WIDTH + _EXPERT_WIDTH * facts.num_chosen_experts
    width += _RECURRENT_WIDTH * (facts.state_bytes > 0)
    layer = width * facts.hidden_size * chunk * size
    sampling = config.decoding.sampling(0)
    # penalised logits, and sorted probabilities
    step = _logits_bytes(config, facts, 1 + facts.asks.of(sampling).penalises + sampling.leaves_out)
    if any(each.has_softcap for each in facts.layers):
        queries = facts.num_heads // facts.num_kv_heads * chunk
        layer += _CAPPED * 4 * queries * longest_request(config, facts)
    if config.job.device == "cpu":
        return max(layer, step)
    # the allocator keeps freed blocks for one kind of forward
    heads = facts.num_heads * facts.head_dim
    # results of prefix and chunk, and three copies in fp32
    merge = chunk * heads * (2 * size + 3 * 4)
    # flash attention has no fp32
    copies = 2 * longest_request(config, facts) * heads * size if size == 4 else 0
    return layer + step + merge + copies


def _logits_bytes(config: RunConfig, facts: ModelFacts, num_copies: int = 1) -> int:
    num_rows = config.decoding.batch_size * (config.tree.most_drafts + 1)
    return num_rows * facts.vocab_size * (DTYPES[config.target.dtype].itemsize + 4 * num_copies)


def _graph_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Drafts share memory, as verifications do."""
    if not can_capture(config):
        return 0
    num_graphs = min(MOST_GRAPHS, _GRAPHS_OF_A_BATCH * config.decoding.batch_size)
    logits = _logits_bytes(config, facts)
    kept = int(_MEAN_LOGITS * logits) if config.decoding.temperature else 0
    return 2 * logits + num_graphs * (GRAPH_BYTES + kept)


def usable_bytes(config: RunConfig) -> int | None:
    """Return a worker's share of a GPU's memory; None for a CPU."""
    whole = device_bytes(torch.device(config.job.device))
    return None if whole is None else int(whole * config.job.gpus_per_worker)


def check_memory(config: RunConfig, facts: ModelFacts) -> None:
    """Check that a GPU can hold a worker. Raises ValueError."""
    if (there := usable_bytes(config)) is None:
        return
    sizes = memory_bytes(config, facts)
    if (needed := sum(sizes.values())) > there:
        weights, cache = (
            sum(size for name, size in sizes.items() if kind in name)
            for kind in ("weights", "cache")
        )
        raise ValueError(
            f"a worker needs {needed / GIB:.1f} GiB of GPU memory ({weights / GIB:.1f} for "
            f"weights, {cache / GIB:.1f} for caches), and has {there / GIB:.1f}; lower "
            "decoding.cache_gib, or take a larger GPU"
        )


def load_cached_target(
    config: RunConfig, num_rows: int, kernels: Kernels, recent: RecentSizes | None = None
) -> tuple[CachedModel, Tensor]:
    """Load the target, and the weight [V, C] of its LM head, which packing hides."""
    device = target_device(config.target, config.job.device)
    scheme = config.target.quantize
    make_current(device)
    model = load_causal_lm(
        config.target.model,
        config.target.dtype,
        "cpu" if scheme else config.job.device,
        config.target.adapter,
    )
    if scheme is not None:  # a GPU never holds all in 16 bits
        whole: nn.Module = model
        layers = model.model.layers
        model.model.layers = nn.ModuleList()
        whole.to(device)
        model.model.layers = layers
    lm_head = model.get_output_embeddings().weight
    of_layers = kernels.of_layers(device)
    target = CachedModel(model, kernels.attend(device), num_rows, of_layers, scheme, recent)
    if config.attention.backend == "auto" and target.device.type == "cpu":
        target.join_layers()
    return target, lm_head
