"""Whether a run may begin: everything is checked that can be without loading a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specextend.attention.hybrid import load_backend
from specextend.cluster.cluster import check_resources, is_local
from specextend.cluster.exits import RefusedError, StoreError
from specextend.cluster.messages import first_line
from specextend.config import RunConfig
from specextend.data.documents import DocumentError, Source, open_source
from specextend.data.fingerprint import build_manifest
from specextend.data.inputs import InputUnreachableError
from specextend.data.prompts import Prompts
from specextend.data.storage import Location, resolve
from specextend.decoding.retrieval import scored_layers
from specextend.loading import GIB, rows_per_sequence
from specextend.models import ModelFacts, load_tokenizer, resolve_device
from specextend.pairing import check_pair, pair_hashes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may begin: everything was checked that can be without loading a model."""

    config: RunConfig
    output: Location
    source: Source
    facts: ModelFacts
    prompts: Prompts
    manifest: dict[str, Any]


def prepare(config: RunConfig) -> Prepared:
    """Check input, models and prompt; writes nothing. Raises RefusedError, StoreError."""
    check_resources(config.target, config.job)
    try:
        output = resolve(config.output.path)
        source = open_source(config.input, config.output)
        draft = config.draft if config.decoding.mode != "autoregressive" else None
        facts = check_pair(config.target, draft)
        scored_layers(config.cache, facts.num_layers)
        tokenizer = load_tokenizer(config.target.model, config.target.revision)
        prompts = Prompts(tokenizer, config.prompt, config.max_tokens(facts.context_length))
        _check_run(config, prompts)
        _check_cache(config, facts)
        manifest = build_manifest(source, config.model_dump(mode="json"), pair_hashes(config.target, draft))
    except InputUnreachableError as error:
        raise StoreError(str(error)) from error
    except (ValueError, OSError) as error:
        raise RefusedError(first_line(error)) from error
    return Prepared(config, output, source, facts, prompts, manifest)


def _check_run(config: RunConfig, prompts: Prompts) -> None:
    """Raise ValueError for what would fail every row, or every worker of a Ray of our own."""
    if is_local():
        load_backend(config.attention.backend, resolve_device(config.target.device))
    if config.input.max_new_tokens_column is None:
        try:
            prompts.room(config.decoding.max_new_tokens)
        except DocumentError as error:
            raise ValueError(f"decoding.max_new_tokens or prompt.max_prompt_tokens: {error.message}") from error


def _check_cache(config: RunConfig, facts: ModelFacts) -> None:
    """Raise ValueError where the cache cannot hold one full prompt and its output."""
    longest = config.max_tokens(facts.context_length)
    if config.prompt.max_prompt_tokens is not None:
        longest = min(longest, config.prompt.max_prompt_tokens + config.decoding.max_new_tokens)
    needed = rows_per_sequence(config, longest) * facts.kv_bytes_per_token(config.target.dtype) / GIB
    if config.decoding.cache_gib < needed:
        raise ValueError(
            f"decoding.cache_gib is {config.decoding.cache_gib:g}, but a prompt and its output may take {longest:,} "
            f"tokens = {needed:.3f} GiB: raise it, or lower prompt.max_prompt_tokens"
        )
