"""Traces: records of one run of the target over a document, with all that drafts and cache policies read of it.

Shapes: `P` prompt tokens, `n` known tokens behind them, `L` layers, `H` query heads, `K` key heads, `D` head size,
`C` hidden size, `F` features, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.core import SamplingParams
from specextend.decoding.cache import Region
from specextend.decoding.device import traits_of
from specextend.decoding.model import CachedModel
from specextend.decoding.sampling import choose_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """A prompt, the text known to follow it, and the target's choices and states along both."""

    prompt_token_ids: list[int]
    known_token_ids: list[int]
    """[n] the answer or the greedy output, then a margin of greedy tokens for trees that reach beyond its end."""
    num_counted: int
    """Number of known tokens without the margin."""
    max_new_tokens: int
    """Limit of a request for this text."""
    choice_token_ids: list[int]
    """[n] the target's own choice in place of each known token, given the known tokens before it."""
    logits: Tensor
    """[n, V] logits of the choices."""
    hidden: Tensor
    """[P + n - 1, C] hidden states after the final norm."""
    outputs: dict[int, Tensor]
    """Layer -> its output [P + n - 1, C]."""
    queries: dict[int, Tensor]
    """Layer -> queries [n, H, D], from the prompt's last position on."""
    keys: dict[int, Tensor]
    """Layer -> keys [K, P + n - 1, D]."""

    @property
    def num_prompt_tokens(self) -> int:
        """Count the prompt's tokens P."""
        return len(self.prompt_token_ids)

    def features(self, layers: Sequence[int]) -> Tensor:
        """Return the features [P + n - 1, F] that a drafter with these `hidden_layers` reads."""
        return torch.cat([self.outputs[layer] for layer in layers], -1) if layers else self.hidden


@dataclass(slots=True)
class _Run:
    """The state of a document that is running through the target."""

    region: Region
    length: int = 0
    hidden: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    queries: list[dict[int, Tensor]] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class TraceRecorder:
    """Records traces of one target."""

    def __init__(
        self,
        target: CachedModel,
        eos_token_ids: Iterable[int],
        *,
        hidden_layers: Iterable[int],
        scored_layers: Iterable[int],
        margin: int,
    ) -> None:
        """Take the target and the layers that all drafts and policies read; `margin` is the deepest tree's depth."""
        self._target, self._eos_token_ids = target, frozenset(eos_token_ids)
        self._hidden_layers, self._scored_layers = tuple(sorted(set(hidden_layers))), frozenset(scored_layers)
        self._margin = margin

    def record(self, prompt: list[int], answer: list[int] | None, max_new_tokens: int) -> Trace:
        """Run a prompt, then the `answer` or, if it is None, greedy output up to EOS or `max_new_tokens`.

        Raises ValueError if the target's cache is too small.
        """
        num_new = max_new_tokens if answer is None else len(answer)
        region = self._target.cache.rows.take(len(prompt) + num_new + self._margin)
        if region is None:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit the cache; choose smaller lengths")
        run = _Run(region)
        try:
            with torch.inference_mode():
                known, num_counted = self._read(run, prompt, answer, max_new_tokens)
                return self._finish(run, prompt, known, num_counted, num_new)
        finally:
            self._target.cache.rows.give_back(region)

    def _read(self, run: _Run, prompt: list[int], answer: list[int] | None, limit: int) -> tuple[list[int], int]:
        """Run everything but the last known token; return the known tokens, and how many of them count."""
        self._forward(run, prompt)
        self._choose(run, run.hidden[-1][-1:])
        if answer is None:
            known = [run.choices[-1]]
            while len(known) < limit and known[-1] not in self._eos_token_ids:
                known.append(self._step(run, known[-1]))
        else:
            known = list(answer)
            if len(answer) > 1:
                self._choose(run, self._forward(run, answer[:-1]))
        num_counted = len(known)
        for _ in range(self._margin):
            known.append(self._step(run, known[-1]))
        return known, num_counted

    def _step(self, run: _Run, token_id: int) -> int:
        """Run one more token, and return the target's choice after it."""
        self._choose(run, self._forward(run, [token_id]))
        return run.choices[-1]

    def _forward(self, run: _Run, token_ids: list[int]) -> Tensor:
        """Run the next tokens [T], and return hidden [T, C]. Chunks of the prompt keep only their last queries."""
        first, keep = len(run.hidden), 1 if run.length == 0 else len(token_ids)
        device = self._target.device
        for chunk in torch.tensor(token_ids, device=device).split(traits_of(device).prefill_chunk):
            positions = torch.arange(run.length, run.length + len(chunk), device=device)
            run.length += len(chunk)
            plan = AttentionPlan(
                starts=[run.region.start],
                lengths=[run.length],
                num_new=len(chunk),
                keep_layers=self._scored_layers,
            )
            hidden, outputs = self._target.forward_with_features(
                chunk.unsqueeze(0), positions.unsqueeze(0), plan, self._hidden_layers
            )
            run.hidden.append(hidden[0])
            run.outputs.append(outputs[0])
            run.queries.append({layer: query[0, -keep:].clone() for layer, query in plan.queries.items()})
        return torch.cat(run.hidden[first:])

    def _choose(self, run: _Run, hidden: Tensor) -> None:
        """Record the target's choices after positions with `hidden` [T, C]."""
        logits = self._target.logits(hidden)
        positions = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)  # unused by greedy choice
        run.logits.append(logits)
        run.choices += choose_tokens(logits, positions, SamplingParams()).tolist()

    def _finish(self, run: _Run, prompt: list[int], known: list[int], num_counted: int, max_new_tokens: int) -> Trace:
        rows = slice(run.region.start, run.region.start + run.length)
        outputs = torch.cat(run.outputs).chunk(max(1, len(self._hidden_layers)), -1)
        return Trace(
            prompt_token_ids=prompt,
            known_token_ids=known,
            num_counted=num_counted,
            max_new_tokens=max_new_tokens,
            choice_token_ids=run.choices,
            logits=torch.cat(run.logits),
            hidden=torch.cat(run.hidden),
            outputs=dict(zip(self._hidden_layers, outputs, strict=False)),
            queries={
                layer: torch.cat([queries[layer] for queries in run.queries])[-len(run.choices) :]
                for layer in self._scored_layers
            },
            keys={layer: self._target.cache.keys[layer, :, rows].clone() for layer in self._scored_layers},
        )
