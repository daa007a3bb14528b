"""Recordings, from which drafts learn: the target runs over a sample once, and its hidden states are kept.

Shapes: `P` prompt tokens, `T` tokens of an answer, `B` summaries decoded together, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import aligned
from specextend.decoding.model import CachedModel
from specextend.training.samples import Sample

CHUNK = 512
"""Most tokens of one forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryOptions:
    """Number and length of the target's summaries of a prompt, and their temperature."""

    count: int = 3
    """Number of summaries of a sample; the first is greedy, the others are sampled."""
    max_new_tokens: int = 112
    temperature: float = 0.7

    def __post_init__(self) -> None:
        if self.count < 1 or self.max_new_tokens < 1 or self.temperature <= 0:
            raise ValueError("summaries: count and max_new_tokens must be 1 or more, temperature above 0")


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens and the target's hidden states at them."""

    token_ids: Tensor
    """[T] int64"""
    hidden: Tensor
    """[T, F] features at the tokens: the last hidden state, or the outputs of several layers"""
    last_hidden: Tensor
    """[T, C] after the final norm, as the LM head reads it"""


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt and its answers, each recorded directly behind the prompt."""

    prompt: Span
    answers: list[Span]

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically."""
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


def count_tokens(path: Path) -> int:
    """Count the tokens of a saved recording without reading a tensor."""
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.endswith(".token_ids")]  # noqa: SIM118  it is no dict
        return sum(file.get_slice(name).get_shape()[0] for name in names)


class Recorder:
    """Records samples with a target whose cache holds `rows_needed` rows."""

    def __init__(
        self,
        target: CachedModel,
        eos_token_ids: frozenset[int],
        options: SummaryOptions,
        layers: tuple[int, ...] = (),
    ) -> None:
        """Take the target; features are the outputs of `layers`, ascending, or without any the last hidden state."""
        self._target, self._eos_token_ids, self._options, self._layers = target, eos_token_ids, options, layers

    @torch.inference_mode()
    def record(self, sample: Sample, seed: int) -> Recording:
        """Record the prompt, the sample's answers and the target's own summaries, sampled with `seed`."""
        length = len(sample.prompt_token_ids)
        prompt = self.read(torch.tensor(sample.prompt_token_ids), 0)
        answers = [self.read(torch.tensor(answer), length) for answer in sample.answers]
        generator = torch.Generator(self._target.device).manual_seed(seed)
        return Recording(prompt, [*answers, *self._summaries(prompt, generator)])

    @torch.inference_mode()
    def read(self, token_ids: Tensor, first: int) -> Span:
        """Run tokens [T] at positions `first` and up, behind those already in the cache."""
        states = []
        for chunk in token_ids.split(CHUNK):
            plan = AttentionPlan([0], [first + len(chunk)], len(chunk))
            states.append(self._forward(chunk[None], torch.arange(first, first + len(chunk))[None], plan))
            first += len(chunk)
        return self._span(token_ids, *(torch.cat(part, 1)[0] for part in zip(*states, strict=True)))

    def _forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Compute features [B, T, F] and last hidden states [B, T, C] of token_ids [B, T]."""
        token_ids, positions = token_ids.to(self._target.device), positions.to(self._target.device)
        hidden, features = self._target.forward_with_features(token_ids, positions, plan, self._layers)
        return features, hidden

    def _span(self, token_ids: Tensor, features: Tensor, hidden: Tensor) -> Span:
        """Copy a span to the CPU, only once if the features are the last hidden states."""
        last_hidden = hidden.to("cpu", copy=True)
        return Span(token_ids.cpu(), features.to("cpu", copy=True) if self._layers else last_hidden, last_hidden)

    def _summaries(self, prompt: Span, generator: torch.Generator) -> list[Span]:
        """Decode [B] summaries of the prompt together, and cut each behind its end."""
        count, length = self._options.count, len(prompt.token_ids)
        starts = [aligned(length + self._options.max_new_tokens + 1) * b for b in range(count)]
        stored = self._target.cache.stored
        for start in starts[1:]:
            stored[..., start : start + length, :] = stored[..., :length, :]
        chosen = self._choose(prompt.last_hidden[-1:].to(self._target.device).expand(count, -1), generator)
        steps = []
        for step in range(self._options.max_new_tokens):
            plan = AttentionPlan(starts, [length + step + 1] * count, 1)
            features, hidden = self._forward(chosen[:, None], torch.full((count, 1), length + step), plan)
            steps.append((chosen[:, None], features, hidden))
            chosen = self._choose(hidden[:, 0], generator)
        columns = [torch.cat(column, 1) for column in zip(*steps, strict=True)]
        return [self._cut(*(column[b] for column in columns)) for b in range(count)]

    def _choose(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Choose the next tokens [B]: greedily for the first sequence, by sampling for the others."""
        logits = self._target.logits(hidden).float()
        sampled = (logits / self._options.temperature).softmax(-1).multinomial(1, generator=generator)[:, 0]
        sampled[0] = logits[0].argmax()
        return sampled

    def _cut(self, token_ids: Tensor, features: Tensor, hidden: Tensor) -> Span:
        """Cut a span behind the first token that ends an output."""
        ends = [i for i, token_id in enumerate(token_ids.tolist()) if token_id in self._eos_token_ids]
        size = ends[0] + 1 if ends else len(token_ids)
        return self._span(token_ids[:size].clone(), features[:size], hidden[:size])


def rows_needed(num_prompt_tokens: int, options: SummaryOptions) -> int:
    """Count the cache rows that prompts of up to `num_prompt_tokens` tokens need."""
    return max(1, options.count) * aligned(num_prompt_tokens + options.max_new_tokens + 1)
