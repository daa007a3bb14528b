"""The sides of a comparison: our engine in each mode and with each draft, transformers' `generate`, and llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from specextend.bench.llama_cpp import describe_llama_cpp, find_obstacle, load_llama_cpp
from specextend.bench.measurement import Measurement, Side
from specextend.config import RunConfig
from specextend.core import Request
from specextend.decoding.decoding_options import Mode
from specextend.decoding.engine import Engine
from specextend.drafters.draft_options import DraftOptions
from specextend.loading import load_engine
from specextend.models import load_causal_lm, read_facts

DraftName = Literal["draft", "ngram", "merged"]
"""Drafts of mode `specextend`: the configuration's model alone, n-grams alone, or both in one tree."""
SideName = Literal[Mode, DraftName, "transformers", "transformers-lookup", "llama.cpp"]
MODES: tuple[Mode, ...] = get_args(Mode)
DRAFTS: tuple[DraftName, ...] = get_args(DraftName)
SIDES: tuple[SideName, ...] = (*MODES, *DRAFTS, "transformers", "transformers-lookup", "llama.cpp")
LOOKUP: Mapping[str, int] = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
"""Options of prompt lookup: transformers' default number of tokens, after matches of three tokens where its default is
two. On six reports, 5 or 10 tokens after matches of 2 or 3 all gave 1.51 to 1.57 tokens a step."""


class EngineSide:
    """Our engine, one document at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure by the engine's own statistics."""
        request = Request(request_id="bench", prompt_token_ids=prompt_token_ids, max_new_tokens=max_new_tokens)
        [completion] = self._engine.generate([request])
        stats = completion.stats
        num_steps = stats.num_spec_steps + stats.num_plain_steps
        return Measurement(completion.token_ids, stats.decode_s, stats.total_s, num_steps, stats=stats)


def draft_name(draft: DraftOptions) -> DraftName:
    """Name the side that has this draft."""
    if draft.kind == "ngram":
        return "ngram"
    return "merged" if draft.ngram else "draft"


def default_sides(config: RunConfig) -> tuple[SideName, ...]:
    """List the sides that the configuration can run, without the one that equals `specextend`."""
    if config.draft is None:
        left_out: set[str] = {"tree", "specextend", "draft", "merged"}
    elif config.draft.kind == "ngram":
        left_out = set(DRAFTS)
    else:
        left_out = {draft_name(config.draft)}
    if find_obstacle(config) is not None:
        left_out |= {"llama.cpp"}
    return tuple(name for name in SIDES if name not in left_out)


def in_mode(config: RunConfig, mode: Mode) -> RunConfig:
    """Put the configuration into a mode, one sequence at a time. Raises ValueError if it lacks the draft."""
    if config.draft is None and mode != "autoregressive":
        raise ValueError(f"the configuration names no draft, which {mode} needs; set draft.kind and draft.model")
    return config.model_copy(update={"decoding": replace(config.decoding, mode=mode, max_batch_size=1)})


def with_draft(config: RunConfig, name: DraftName) -> RunConfig:
    """Give the configuration another draft, in mode `specextend`. Raises ValueError if it names no model for it."""
    if name == "ngram":
        draft = DraftOptions(kind="ngram")
    elif config.draft is None or config.draft.kind == "ngram":
        raise ValueError(f"the configuration names no model to draft with, which {name} needs; set draft.model")
    else:
        draft = replace(config.draft, ngram=name == "merged")
    values = in_mode(config.model_copy(update={"draft": draft}), "specextend").model_dump(mode="json")
    return RunConfig.from_values(values)  # which checks that the tree and the cache fit this draft too


def side_config(config: RunConfig, name: SideName) -> RunConfig | None:
    """Return the configuration of one of our sides; None for others. Raises ValueError if the side is impossible."""
    if name in MODES:
        return in_mode(config, name)
    return with_draft(config, name) if name in DRAFTS else None


def describe_sides(config: RunConfig, names: Sequence[SideName]) -> dict[str, dict[str, Any]]:
    """Describe each side as JSON values: the engine's mode and draft, or the other engine's options. Loads nothing.

    Raises ValueError if a side is impossible.
    """
    return {name: _describe(config, name) for name in names}


def _describe(config: RunConfig, name: SideName) -> dict[str, Any]:
    if name == "llama.cpp":
        return describe_llama_cpp(config)
    own = side_config(config, name)
    if own is None:
        return {"generate": {**_generate_options(name)}}
    draft = None if own.active_draft is None else draft_name(own.active_draft)
    return {"mode": own.decoding.mode, "draft": draft}


def load_side(name: SideName, config: RunConfig) -> Side:
    """Load one side. Raises ValueError if its model cannot be served."""
    own = side_config(config, name)
    if own is not None:
        return EngineSide(load_engine(own))
    if name == "llama.cpp":
        return load_llama_cpp(config)
    target = config.target
    model = load_causal_lm(target.model, target.revision, target.dtype, target.device, "sdpa")
    eos_token_ids = read_facts(target.model, target.revision).eos_token_ids
    return TransformersSide(model, eos_token_ids, _generate_options(name))


def _generate_options(name: SideName) -> dict[str, int]:
    return {**LOOKUP} if name == "transformers-lookup" else {}


class TransformersSide:
    """`generate(do_sample=False)` of a stock model with its own sdpa attention and dynamic cache."""

    def __init__(self, model: Any, eos_token_ids: Iterable[int], options: Mapping[str, int] | None = None) -> None:
        """Take the model; `options` are further values of `GenerationConfig`, such as LOOKUP."""
        self._model = model
        self._eos_token_ids = [*eos_token_ids]
        self._options = options or {}

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure."""
        prompt = torch.tensor([prompt_token_ids], device=self._model.device)
        clock = TokenClock(prompt.device)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._eos_token_ids or None,
            pad_token_id=self._eos_token_ids[0] if self._eos_token_ids else 0,
            **self._options,
        )
        begin = clock.now()
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        end = clock.now()
        assert clock.first_token_at is not None, "generate makes one token at least"
        return Measurement(
            output[0, len(prompt_token_ids) :].tolist(),
            decode_s=end - clock.first_token_at,
            total_s=end - begin,
            num_steps=clock.num_passes - 1,
            num_first_tokens=clock.first_length - len(prompt_token_ids),
        )


class TokenClock(StoppingCriteria):
    """A stopping criterion that never stops: it records the time of the first tokens, and counts the target's passes.

    `generate` calls it after each pass, which adds one token, or with prompt lookup all that were accepted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first_token_at: float | None = None
        self.first_length = 0
        """Prompt and output tokens after the pass over the prompt."""
        self.num_passes = 0
        """Forward passes, the one over the prompt included."""

    def now(self) -> float:
        """Return the time in seconds once the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Count a pass; input_ids [1, prompt and output so far]."""
        if self.first_token_at is None:
            self.first_token_at = self.now()
            self.first_length = input_ids.shape[1]
        self.num_passes += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
