"""A recording as an EAGLE head reads it: one slot for each token, first of the prompt, then of each answer.

Slot i holds the embedding of token i + 1 and the target's hidden state at i. From them the head predicts the target's
hidden state at i + 1, which decides token i + 2.

Shapes: `S` slots, `Q` of them asked, `F` features, `C` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.drafters.causal import HISTORY
from specextend.training.recording import Recording, Span


@dataclass(frozen=True, slots=True)
class SlotInputs:
    """The tokens at some slots, the tokens before them, and their positions."""

    token_ids: Tensor
    """[S] int64: token i + 1"""
    history: Tensor
    """[S, 3] int64: tokens i, i - 1, i - 2; the first token stands for those before it"""
    positions: Tensor
    """[S] int64: i"""

    def at(self, slots: Tensor) -> SlotInputs:
        """Select `slots` [n]."""
        return SlotInputs(self.token_ids[slots], self.history[slots], self.positions[slots])

    def to(self, device: torch.device) -> SlotInputs:
        """Move to `device`."""
        return SlotInputs(self.token_ids.to(device), self.history.to(device), self.positions.to(device))


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots of a recording."""

    places: SlotInputs
    hidden: Tensor
    """[S, F] at i"""
    labels: Tensor
    """[S, C] last hidden state at i + 1, which the head predicts"""
    groups: Tensor
    """[S] int64: 0 for the prompt, 1 and up for the answers; each is contiguous"""

    def to(self, device: torch.device) -> Slots:
        """Move to `device`."""
        return Slots(self.places.to(device), *(x.to(device) for x in (self.hidden, self.labels, self.groups)))

    def visible(self, asked: Tensor) -> Tensor:
        """Return the mask [Q, S] bool of what each asked slot sees: the prompt, and its own answer up to itself."""
        own = self.groups[asked][:, None]
        before = self.places.positions[None] <= self.places.positions[asked][:, None]
        return before & ((self.groups[None] == 0) | (self.groups[None] == own))

    def follow(self, asked: Tensor, steps: int) -> Tensor:
        """Return, for each asked slot, whether the slot `steps` further belongs to the same group: [Q] bool."""
        last = len(self.groups) - 1
        return (asked + steps <= last) & (self.groups[(asked + steps).clamp(max=last)] == self.groups[asked])


def lay_out(recording: Recording) -> Slots:
    """Lay out a recording as slots."""
    parts = [_prompt(recording.prompt), *(_answer(recording.prompt, answer) for answer in recording.answers)]
    groups = [torch.full_like(part[0], number) for number, part in enumerate(parts)]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    token_ids, history, hidden, labels, positions = columns
    return Slots(SlotInputs(token_ids, history, positions), hidden, labels, torch.cat(groups))


def _prompt(prompt: Span) -> tuple[Tensor, ...]:
    tokens, size = prompt.token_ids, len(prompt.token_ids) - 1
    history = _history(tokens, torch.arange(size))
    return tokens[1:], history, prompt.hidden[:-1], prompt.last_hidden[1:], torch.arange(size)


def _answer(prompt: Span, answer: Span) -> tuple[Tensor, ...]:
    tokens = torch.cat([prompt.token_ids, answer.token_ids])
    positions = torch.arange(len(prompt.token_ids) - 1, len(tokens) - 1)
    hidden = torch.cat([prompt.hidden[-1:], answer.hidden[:-1]])
    return answer.token_ids, _history(tokens, positions), hidden, answer.last_hidden, positions


def _history(tokens: Tensor, positions: Tensor) -> Tensor:
    """Collect the tokens at `positions` [n] and at the two before each: [n, 3]."""
    return tokens[(positions[:, None] - torch.arange(HISTORY)).clamp(min=0)]
