"""Target and draft: checks, identities, and loading the draft."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from specextend.attention.plan import TreeAttention
from specextend.config import RunConfig
from specextend.data.prompts import end_of_turn
from specextend.decoding.cache import aligned
from specextend.decoding.decoding_options import DraftOptions
from specextend.decoding.device import Graphs, traits_of
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Drafter
from specextend.drafters.causal import CausalDrafter, DraftNetwork, stands_still
from specextend.drafters.eagle_network import EagleNetwork
from specextend.drafters.formats import read_head, read_vocabulary, read_weights
from specextend.drafters.lm_networks import ModelNetwork, MtpNetwork
from specextend.drafters.ngram import NgramDrafter
from specextend.models.causal_lm import (
    ModelFacts,
    TargetOptions,
    check_model,
    check_mtp,
    check_target,
    fetch_if_missing,
    load_causal_lm,
    load_mtp,
    load_tokenizer,
    num_parameters,
    read_facts,
    read_mtp,
    rope_frequencies,
    tokens_sha256,
)
from specextend.models.checkpoints import adapter_folder
from specextend.models.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FLOATS,
    ModelError,
    hash_files,
    identify,
)
from specextend.proof.family import check_family


def check_pair(target: TargetOptions, draft: DraftOptions | None) -> ModelFacts:
    """Return the target's facts if the pair can run, by configs, tokenizers and headers.

    Raises:
        ModelError: A model is not served, or the draft does not fit the target.
    """
    fetch_if_missing(target.model)
    checked = check_target(target)
    if not checked.is_fused:
        check_family(target.model, with_trees=draft is not None)
    tokenizer = load_tokenizer(target.model)
    facts = _with_tokenizer(checked, tokenizer)
    if draft is not None and draft.kind == "eagle":
        _check_eagle(draft, facts, tokenizer)
    elif draft is not None and draft.kind == "mtp":
        check_mtp(target.model)
    elif draft is not None and draft.kind == "model":
        _check_model(draft, facts, tokenizer)
    return facts


def _with_tokenizer(facts: ModelFacts, tokenizer: Any) -> ModelFacts:
    token, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last >= facts.vocab_size:
        raise ModelError(
            f"{facts.name} has an embedding for {facts.vocab_size} tokens, and a tokenizer with "
            f"token {last} ({token!r}): take the model's own tokenizer"
        )
    said = {"tokenizer": tokenizer.eos_token_id, "chat template": end_of_turn(tokenizer)}
    ends = facts.ends | {
        place: (token_id,) for place, token_id in said.items() if token_id is not None
    }
    facts = replace(facts, ends=ends)
    if ends and not facts.eos_token_ids:
        raise ModelError(f"{facts.name} ends its outputs with tokens that it lacks: {ends}")
    return facts


def describe_features(draft: DraftOptions | None, num_target_layers: int) -> Iterator[str]:
    """Describe the layers that an EAGLE-3 head reads."""
    if draft is None or draft.kind != "eagle" or not (head := read_head(draft.model)).fused:
        return
    layers, why, _ = head.explain_layers(num_target_layers, draft.feature_layers)
    yield (
        f"draft {draft.model} ({head.format}) takes the outputs of the target's layers "
        f"{', '.join(map(str, layers))} (of {num_target_layers}, from 0): {why}"
    )


def guessed_layers(draft: DraftOptions | None, num_target_layers: int) -> list[tuple[int, ...]]:
    """Return the layers of both readings of an EAGLE-3 head with ambiguous ids, chosen ones first.

    The list is empty for other drafts.
    """
    if draft is None or draft.kind != "eagle" or not (head := read_head(draft.model)).fused:
        return []
    layers, _, other = head.explain_layers(num_target_layers, draft.feature_layers)
    return [layers, other] if other and other[0] >= 0 else []


def describe_asks(facts: ModelFacts) -> Iterator[str]:
    """Describe the target's generation config, and its keys without effect."""
    asks = facts.asks
    done = [f"repetition_penalty {asks.repetition_penalty}"] * (asks.repetition_penalty != 1)
    done += [f"no_repeat_ngram_size {asks.no_repeat_ngram_size}"] * (asks.no_repeat_ngram_size > 0)
    done += [f"suppress_tokens ({len(asks.suppress_tokens)})"] * bool(asks.suppress_tokens)
    said = [f"{', '.join(done)}: done, where decoding.* says nothing else"] * bool(done)
    said += [f"{', '.join(asks.passed_over)}: not done"] * bool(asks.passed_over)
    if said:
        yield f"{facts.name} asks in its generation_config.json for {'; '.join(said)}"


def pair_hashes(target: TargetOptions, draft: DraftOptions | None) -> dict[str, str]:
    """Return the identities of `target`, `tokenizer`, `adapter` and `draft`."""
    found = identify(target.model)
    named = {"target": found["weights"], "tokenizer": found["tokenizer"]}
    if target.adapter is not None:
        folder = adapter_folder(target.adapter)
        named["adapter"] = hash_files([folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS])
    if draft is not None and draft.model:
        named["draft"] = identify(draft.model)["weights"]
    return named


def check_files(
    target: TargetOptions, draft: DraftOptions | None, expected: Mapping[str, str]
) -> None:
    """Raise ModelError unless this machine has the driver's files."""
    fetch_if_missing(target.model)
    for part, sha256 in pair_hashes(target, draft).items():
        if sha256 != expected[part]:
            named = {"draft": draft and draft.model, "adapter": target.adapter}
            model = named.get(part) or target.model
            raise ModelError(
                f"the {part} in {model} on {platform.node()} is not the run's: its files have the "
                f"hash {sha256[:12]}, the run's {expected[part][:12]}; put the run's files there"
            )


def load_drafter(
    config: RunConfig,
    target: CachedModel,
    lm_head: Tensor,
    num_rows: int,
    graphs: Graphs | None = None,
) -> Drafter | None:
    """Load the drafter of a configuration, if it has a draft.

    Args:
        lm_head: [V, C] of the target.
        num_rows: Rows of the target's cache.
    """
    draft = config.active_draft
    if draft is None:
        return None
    if draft.kind == "ngram":
        return NgramDrafter(config.tree, target.device)
    network: DraftNetwork
    cache = config.active_cache
    rows = draft_rows(config, num_rows)
    if draft.kind == "eagle":
        head = read_head(draft.model)
        network = EagleNetwork(
            head,
            read_weights(head, str(target.device)),
            read_vocabulary(head),
            target,
            lm_head,
            rows,
            rope_frequencies(head.rope, head.head_dim, draft.model),
            head.hidden_layers(target.config.num_hidden_layers, draft.feature_layers),
        )
    elif draft.kind == "mtp":
        options = config.target
        layer, joining = load_mtp(options.model, options.dtype, str(target.device))
        network = MtpNetwork(layer, joining, target, rows)
    else:
        network = _load_model(config, draft, target, rows[1])
    visible = None if cache.policy == "full" else cache.top_k_chunks * cache.chunk_size
    # only with policy `full` a draft sees much; one call attends apart anyway
    in_one_call = draft.kind == "model" and target.runs_in_one_call
    tree_attention = how_trees_attend(config, reads_much=visible is None and not in_one_call)
    # trees of one size have reproducible counts
    clock = perf_counter if config.tree.nodes == "auto" else stands_still
    drafter = CausalDrafter(
        network, config.tree, tree_attention, visible, config.decoding.batch_size, graphs, clock
    )
    return NgramDrafter(config.tree, target.device, drafter, clock) if draft.ngram else drafter


def how_trees_attend(config: RunConfig, *, reads_much: bool) -> TreeAttention:
    """Return how trees attend; if much is read, two calls beat a mask."""
    if config.decoding.mode == "tree":
        return "dense"
    if config.attention.tree != "auto":
        return config.attention.tree
    return "hybrid" if reads_much and config.attention.backend != "triton" else "dense"


def draft_rows(config: RunConfig, num_rows: int) -> tuple[int, int]:
    """Return the rows of a draft's full and working cache.

    The working cache holds what a full batch sees, and its trees. Only heads have a full cache.
    """
    levels = config.num_tree_levels
    cache = config.active_cache
    batch_size = config.decoding.batch_size
    trees = config.tree.most_drafts * levels
    draft = config.active_draft
    is_head = draft is not None and draft.is_head
    num_full = num_rows + batch_size * aligned(2 * levels + 1)
    # each sequence may need any number
    if cache.policy == "full" or config.input.has_limits:
        num_visible = num_full + batch_size * aligned(trees)
    else:
        seen = cache.top_k_chunks * cache.chunk_size + config.most_new_tokens + 2 * levels + 1
        num_visible = batch_size * aligned(seen + trees)
    return num_full if is_head else 0, num_visible


def draft_size(config: RunConfig) -> DraftSize:
    """Compute a draft's size from configs and headers."""
    draft = config.active_draft
    if draft is None or draft.kind == "ngram":
        return DraftSize(0, 0)
    if draft.kind == "eagle":
        return _size_eagle(draft)
    if draft.kind == "mtp":
        num_weights, layer = read_mtp(config.target.model)
        return DraftSize(num_weights, layer.numbers, 1)
    return DraftSize(num_parameters(draft.model), read_facts(draft.model).kv_numbers_per_token)


class DraftSize(NamedTuple):
    """Numbers that a draft holds in memory."""

    num_parameters: int
    num_cached: int
    """Keys and values of a row."""
    num_layers_read: int = 0


def _check_eagle(draft: DraftOptions, facts: ModelFacts, tokenizer: Any) -> None:
    head = read_head(draft.model)
    read_vocabulary(head)
    rope_frequencies(head.rope, head.head_dim, draft.model)
    try:
        head.hidden_layers(facts.num_layers, draft.feature_layers)
    except ValueError as error:
        raise ModelError(f"draft {draft.model} does not fit target {facts.name}: {error}") from None
    _check_equal(draft, facts, "hidden_size", head.target_hidden_size, facts.hidden_size)
    _check_equal(draft, facts, "vocab_size", head.vocab_size, facts.vocab_size)
    # a head has no tokenizer
    if head.tokens_sha256 is not None and head.tokens_sha256 != tokens_sha256(tokenizer):
        raise ModelError(
            f"draft {draft.model} does not fit target {facts.name}: it was trained for another "
            "tokenizer"
        )


def _check_model(draft: DraftOptions, facts: ModelFacts, ours: Any) -> None:
    checked = check_model(draft.model)
    if checked.state_bytes:
        raise ModelError(
            f"draft {draft.model} has layers with a recurrent state, which drafts no trees; take "
            "one without such layers, or draft.kind: ngram"
        )
    if not checked.is_fused:
        check_family(draft.model, with_trees=True)
    num_rows = min(checked.vocab_size, facts.vocab_size)
    theirs = load_tokenizer(draft.model)
    _check_equal(draft, facts, "bos_token_id", theirs.bos_token_id, ours.bos_token_id)
    _check_equal(draft, facts, "eos_token_id", theirs.eos_token_id, ours.eos_token_id)
    # an id of both vocabularies has to be the same token
    their_tokens, our_tokens = (
        {token_id: token for token, token_id in each.get_vocab().items()} for each in (theirs, ours)
    )
    for token_id in sorted({*range(num_rows)} & their_tokens.keys() & our_tokens.keys()):
        both = their_tokens[token_id], our_tokens[token_id]
        _check_equal(draft, facts, f"token {token_id}", *both)


def _check_equal(
    draft: DraftOptions, facts: ModelFacts, what: str, theirs: object, ours: object
) -> None:
    if theirs != ours:
        raise ModelError(
            f"draft {draft.model} does not fit target {facts.name}: {what} is {theirs!r}, the "
            f"target's is {ours!r}"
        )


def _size_eagle(draft: DraftOptions) -> DraftSize:
    head = read_head(draft.model)
    count = sum(math.prod(info.shape) for info in head.sources.values() if info.dtype in FLOATS)
    # the head copies rows of the target's LM head
    if head.is_ours and head.draft_vocab_size < head.vocab_size:
        count += head.draft_vocab_size * head.hidden_size
    return DraftSize(
        count, 2 * (head.num_kv_heads + head.copy_heads) * head.head_dim, head.num_layers_read
    )


def _load_model(
    config: RunConfig, draft: DraftOptions, target: CachedModel, num_rows: int
) -> ModelNetwork:
    model = load_causal_lm(draft.model, config.target.dtype, str(target.device))
    cached = CachedModel(model, target.attend, num_rows, target.kernels)
    if target.runs_in_one_call:
        cached.join_layers()
    facts = read_facts(draft.model)
    # the end of a text stands for tokens that the draft lacks
    sizes = facts.vocab_size, target.config.vocab_size
    return ModelNetwork(
        cached,
        config.cache.chunk_size,
        traits_of(target.device).prefill_chunk,
        None if sizes[0] == sizes[1] else min(sizes),
        next(iter(facts.eos_token_ids), 0),
    )
