"""A recording as an EAGLE head sees it: one slot a token, the prompt's once, each answer's behind it.

Slot i holds the embedding of token i + 1 and the target's hidden state at i; it is to give the target's choice of token
i + 2, which its hidden state at i + 1 tells.

Shapes: `S` slots, `Q` of them asked, `F` features, `C` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.drafters.network import HISTORY
from specextend.training.recording import Recording, Span


@dataclass(frozen=True, slots=True)
class Places:
    """The tokens around some slots, and where they stand."""

    token_ids: Tensor
    """[S] int64: token i + 1"""
    history: Tensor
    """[S, 3] int64: tokens i, i - 1, i - 2; the first token stands for what is before it"""
    positions: Tensor
    """[S] int64: i"""

    def at(self, slots: Tensor) -> Places:
        """Those of `slots` [n]."""
        return Places(self.token_ids[slots], self.history[slots], self.positions[slots])

    def to(self, device: torch.device) -> Places:
        """The same on `device`."""
        return Places(self.token_ids.to(device), self.history.to(device), self.positions.to(device))


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots of a recording."""

    places: Places
    hidden: Tensor
    """[S, F] at i"""
    labels: Tensor
    """[S, C] last hidden state at i + 1"""
    groups: Tensor
    """[S] int64: 0 for the prompt, 1 and up for the answers; each is contiguous"""

    def to(self, device: torch.device) -> Slots:
        """The same on `device`."""
        return Slots(self.places.to(device), *(x.to(device) for x in (self.hidden, self.labels, self.groups)))

    def visible(self, asked: Tensor) -> Tensor:
        """[Q, S] bool: a slot sees the prompt's and its own answer's slots up to itself."""
        own = self.groups[asked][:, None]
        before = self.places.positions[None] <= self.places.positions[asked][:, None]
        return before & ((self.groups[None] == 0) | (self.groups[None] == own))

    def follow(self, asked: Tensor, steps: int) -> Tensor:
        """[Q] bool: whether the slot `steps` further is of the same group."""
        last = len(self.groups) - 1
        return (asked + steps <= last) & (self.groups[(asked + steps).clamp(max=last)] == self.groups[asked])


def lay_out(recording: Recording) -> Slots:
    """The slots of a recording."""
    parts = [_prompt(recording.prompt), *(_answer(recording.prompt, answer) for answer in recording.answers)]
    groups = [torch.full_like(part[0], number) for number, part in enumerate(parts)]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    token_ids, history, hidden, labels, positions = columns
    return Slots(Places(token_ids, history, positions), hidden, labels, torch.cat(groups))


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
    """[n, 3]: the tokens at `positions` [n] and at the two before each."""
    return tokens[(positions[:, None] - torch.arange(HISTORY)).clamp(min=0)]
