"""transformers' own `generate`, plain and with prompt lookup, under a clock."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from specextend.bench.measurement import Measurement

LOOKUP: Mapping[str, int] = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
"""Prompt lookup: as many tokens as transformers' candidate generator looks up by default, after matches of three tokens
before its default of two. On six reports 5 or 10 tokens after matches of 2 or 3 brought 1.51 to 1.57 tokens a step."""


class TransformersSide:
    """`generate(do_sample=False)` of a stock model: its own sdpa attention, its own dynamic cache."""

    def __init__(self, model: Any, eos_token_ids: Iterable[int], options: Mapping[str, int] | None = None) -> None:
        """`options`: more of `GenerationConfig`, such as LOOKUP."""
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
    """Never stops anything; notes when the first tokens were there, and counts the target's passes.

    `generate` asks it after each pass: of one token, or of all that a pass of prompt lookup accepted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first_token_at: float | None = None
        self.first_length = 0
        """Prompt and output tokens after the pass over the prompt."""
        self.num_passes = 0
        """The one over the prompt included."""

    def now(self) -> float:
        """Seconds, once the device has done what it was told."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Called after each pass; input_ids [1, prompt and output so far]."""
        if self.first_token_at is None:
            self.first_token_at = self.now()
            self.first_length = input_ids.shape[1]
        self.num_passes += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
