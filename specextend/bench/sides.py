"""What is compared: our engine in each of its modes, and transformers' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from specextend.config import RunConfig
from specextend.core import Completion, Request
from specextend.decoding.options import Mode
from specextend.loading import load_engine
from specextend.models import load_causal_lm, read_facts
from specextend.stats import DecodingStats, ratio

SideName = Literal["autoregressive", "tree", "specextend", "transformers"]
MODES: tuple[Mode, ...] = ("autoregressive", "tree", "specextend")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One document, decoded greedily."""

    token_ids: list[int]
    decode_s: float
    """First to last token."""
    total_s: float
    """Start to last token."""
    stats: DecodingStats | None = None
    """Of our engine."""

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first; None for a single token."""
        return ratio(len(self.token_ids) - 1, self.decode_s)

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        """All tokens, prefill included."""
        return ratio(len(self.token_ids), self.total_s)


class Side(Protocol):
    """One way to decode a document greedily."""

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure."""


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
        return Measurement(completion.token_ids, stats.decode_s, stats.total_s, stats)


class TransformersSide:
    """`generate(do_sample=False)` of a stock model: its own sdpa attention, its own dynamic cache."""

    def __init__(self, model: Any, eos_token_ids: Iterable[int]) -> None:
        self._model = model
        self._eos_token_ids = [*eos_token_ids]

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure."""
        prompt = torch.tensor([prompt_token_ids], device=self._model.device)
        clock = TokenClock(prompt.device)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._eos_token_ids or None,
            pad_token_id=self._eos_token_ids[0] if self._eos_token_ids else 0,
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
        return Measurement(output[0, len(prompt_token_ids) :].tolist(), end - clock.first_token_at, end - begin)


class TokenClock(StoppingCriteria):
    """Never stops anything; notes when the first token was there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first_token_at: float | None = None

    def now(self) -> float:
        """Seconds, once the device has done what it was told."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Called after each token."""
        if self.first_token_at is None:
            self.first_token_at = self.now()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def in_mode(config: RunConfig, mode: Mode) -> RunConfig:
    """The same configuration in another mode, one sequence at a time. Raises ValueError where it lacks a draft."""
    if config.draft is None and mode != "autoregressive":
        raise ValueError(f"the configuration names no draft, which {mode} needs; set draft.kind and draft.model")
    return config.model_copy(update={"decoding": replace(config.decoding, mode=mode, max_batch_size=1)})


def load_side(name: SideName, config: RunConfig) -> Side:
    """Load one side. Raises ValueError for a model that cannot be served."""
    if name != "transformers":
        return EngineSide(load_engine(in_mode(config, name)))
    target = config.target
    model = load_causal_lm(target.model, target.revision, target.dtype, target.device, "sdpa")
    return TransformersSide(model, read_facts(target.model, target.revision).eos_token_ids)
