"""Running the target once over a sample and keeping what drafts learn from: its hidden states.

Shapes: `P` prompt tokens, `T` tokens of an answer, `B` summaries decoded together, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import aligned
from specextend.decoding.model import CachedModel
from specextend.training.samples import Sample

CHUNK = 512
"""Tokens of one forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryOptions:
    """The target's own answers to a prompt."""

    count: int = 3
    """Summaries of a sample; the first is greedy, the others are sampled."""
    max_new_tokens: int = 112
    temperature: float = 0.7


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens and what the target made of them."""

    token_ids: Tensor
    """[T] int64"""
    hidden: Tensor
    """[T, F] features at the tokens: the last hidden state, or outputs of several layers"""
    last_hidden: Tensor
    """[T, C] after the final norm, which the LM head sees"""


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt and the answers that follow it, each directly."""

    prompt: Span
    answers: list[Span]

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {}
        for name, span in (("prompt", self.prompt), *((f"answer{i}", span) for i, span in enumerate(self.answers))):
            tensors[f"{name}.token_ids"], tensors[f"{name}.hidden"] = span.token_ids, span.hidden
            if span.last_hidden is not span.hidden:
                tensors[f"{name}.last_hidden"] = span.last_hidden
        temporary = path.with_suffix(".tmp")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> Recording:
        """Read what `save` wrote."""
        tensors = load_file(path)

        def span(name: str) -> Span:
            hidden = tensors[f"{name}.hidden"]
            return Span(tensors[f"{name}.token_ids"], hidden, tensors.get(f"{name}.last_hidden", hidden))

        count = sum(name.startswith("answer") and name.endswith(".token_ids") for name in tensors)
        return Recording(span("prompt"), [span(f"answer{i}") for i in range(count)])


class Recorder:
    """Runs samples through the target, whose cache must hold `rows_needed` rows."""

    def __init__(self, target: CachedModel, eos_token_ids: frozenset[int], options: SummaryOptions) -> None:
        self._target, self._eos_token_ids, self._options = target, eos_token_ids, options

    @torch.inference_mode()
    def record(self, sample: Sample) -> Recording:
        """The prompt, the answers given and the target's own summaries."""
        prompt_ids = torch.tensor(sample.prompt_token_ids)
        prompt = self._read(prompt_ids, 0)
        answers = [self._read(torch.tensor(answer), len(prompt_ids)) for answer in sample.answers]
        return Recording(prompt, [*answers, *self._summaries(prompt)])

    def _read(self, token_ids: Tensor, first: int) -> Span:
        """Run tokens that stand at `first` and up."""
        hidden = []
        for chunk in token_ids.split(CHUNK):
            plan = AttentionPlan([0], [first + len(chunk)], len(chunk))
            positions = torch.arange(first, first + len(chunk))
            hidden.append(self._target.forward(chunk[None], positions[None], plan)[0].cpu())
            first += len(chunk)
        states = torch.cat(hidden)
        return Span(token_ids, states, states)

    def _summaries(self, prompt: Span) -> list[Span]:
        """[B] continuations of the prompt, decoded together, each cut behind its end."""
        count, length = self._options.count, len(prompt.token_ids)
        starts = [aligned(length + self._options.max_new_tokens + 1) * b for b in range(count)]
        for stored in (self._target.cache.keys, self._target.cache.values):
            for start in starts[1:]:
                stored[:, start : start + length] = stored[:, :length]
        chosen = self._choose(prompt.last_hidden[-1:].expand(count, -1))
        token_ids, hidden = [], []
        for step in range(self._options.max_new_tokens):
            plan = AttentionPlan(starts, [length + step + 1] * count, 1)
            states = self._target.forward(chosen[:, None], torch.full((count, 1), length + step), plan)[:, 0]
            token_ids.append(chosen)
            hidden.append(states)
            chosen = self._choose(states)
        return [self._cut(torch.stack(token_ids, 1)[b], torch.stack(hidden, 1)[b]) for b in range(count)]

    def _choose(self, hidden: Tensor) -> Tensor:
        """[B] next tokens: greedy for the first sequence, sampled for the others."""
        logits = self._target.logits(hidden).float()
        sampled = (logits / self._options.temperature).softmax(-1).multinomial(1)[:, 0]
        sampled[0] = logits[0].argmax()
        return sampled

    def _cut(self, token_ids: Tensor, hidden: Tensor) -> Span:
        ends = [i for i, token_id in enumerate(token_ids.tolist()) if token_id in self._eos_token_ids]
        size = ends[0] + 1 if ends else len(token_ids)
        return Span(token_ids[:size].clone(), hidden[:size].clone(), hidden[:size].clone())


def rows_needed(num_prompt_tokens: int, options: SummaryOptions) -> int:
    """Cache rows for prompts of up to so many tokens."""
    return max(1, options.count) * aligned(num_prompt_tokens + options.max_new_tokens + 1)
