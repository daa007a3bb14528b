"""What is compared: our engine in each of its modes and with each of its drafts, and transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, get_args

from specextend.bench.generate import LOOKUP, TransformersSide
from specextend.bench.measurement import Measurement, Side
from specextend.config import RunConfig
from specextend.core import Completion, Request
from specextend.decoding.options import Mode
from specextend.drafters.options import DraftOptions
from specextend.loading import load_engine
from specextend.models import load_causal_lm, read_facts

DraftName = Literal["draft", "ngram", "merged"]
"""A draft of mode `specextend`: the configuration's model alone, n-grams alone, both in one tree."""
SideName = Literal[Mode, DraftName, "transformers", "transformers-lookup"]
MODES: tuple[Mode, ...] = get_args(Mode)
DRAFTS: tuple[DraftName, ...] = get_args(DraftName)
SIDES: tuple[SideName, ...] = (*MODES, *DRAFTS, "transformers", "transformers-lookup")


class EngineLike(Protocol):
    """What a benchmark needs of an engine."""

    def generate(self, source: Iterable[Request | None]) -> Iterator[Completion]:
        """Decode requests."""


class EngineSide:
    """Our engine, one document at a time."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure; seconds are the engine's own."""
        request = Request(request_id="bench", prompt_token_ids=prompt_token_ids, max_new_tokens=max_new_tokens)
        [completion] = self._engine.generate([request])
        stats = completion.stats
        num_steps = stats.num_spec_steps + stats.num_plain_steps
        return Measurement(completion.token_ids, stats.decode_s, stats.total_s, num_steps, stats=stats)


def draft_name(draft: DraftOptions) -> DraftName:
    """What a configured draft is called among the sides."""
    if draft.kind == "ngram":
        return "ngram"
    return "merged" if draft.ngram else "draft"


def default_sides(config: RunConfig) -> tuple[SideName, ...]:
    """Every side that the configuration can run, without the one that is `specextend` under another name."""
    if config.draft is None:
        left_out: set[str] = {"tree", "specextend", "draft", "merged"}
    elif config.draft.kind == "ngram":
        left_out = set(DRAFTS)
    else:
        left_out = {draft_name(config.draft)}
    return tuple(name for name in SIDES if name not in left_out)


def in_mode(config: RunConfig, mode: Mode) -> RunConfig:
    """The same configuration in another mode, one sequence at a time. Raises ValueError where it lacks a draft."""
    if config.draft is None and mode != "autoregressive":
        raise ValueError(f"the configuration names no draft, which {mode} needs; set draft.kind and draft.model")
    return config.model_copy(update={"decoding": replace(config.decoding, mode=mode, max_batch_size=1)})


def with_draft(config: RunConfig, name: DraftName) -> RunConfig:
    """The same configuration with another draft, in mode `specextend`. Raises ValueError where it has no such draft."""
    if name == "ngram":
        draft = DraftOptions(kind="ngram")
    elif config.draft is None or config.draft.kind == "ngram":
        raise ValueError(f"the configuration names no model to draft with, which {name} needs; set draft.model")
    else:
        draft = replace(config.draft, ngram=name == "merged")
    values = in_mode(config.model_copy(update={"draft": draft}), "specextend").model_dump(mode="json")
    return RunConfig.from_values(values)  # which checks that the tree and the cache fit this draft too


def side_config(config: RunConfig, name: SideName) -> RunConfig | None:
    """The configuration of a side of our engine; None for transformers. Raises ValueError where it cannot be."""
    if name in MODES:
        return in_mode(config, name)
    return with_draft(config, name) if name in DRAFTS else None


def describe_sides(config: RunConfig, names: Sequence[SideName]) -> dict[str, dict[str, Any]]:
    """What each side runs, as JSON values: the engine's mode and draft, or `generate`'s options. Loads nothing."""
    return {name: _describe(config, name) for name in names}


def _describe(config: RunConfig, name: SideName) -> dict[str, Any]:
    own = side_config(config, name)
    if own is None:
        return {"generate": {**_generate_options(name)}}
    draft = None if own.decoding.mode == "autoregressive" or own.draft is None else draft_name(own.draft)
    return {"mode": own.decoding.mode, "draft": draft}


def load_side(name: SideName, config: RunConfig) -> Side:
    """Load one side. Raises ValueError for a model that cannot be served."""
    own = side_config(config, name)
    if own is not None:
        return EngineSide(load_engine(own))
    target = config.target
    model = load_causal_lm(target.model, target.revision, target.dtype, target.device, "sdpa")
    eos_token_ids = read_facts(target.model, target.revision).eos_token_ids
    return TransformersSide(model, eos_token_ids, _generate_options(name))


def _generate_options(name: SideName) -> dict[str, int]:
    return {**LOOKUP} if name == "transformers-lookup" else {}
