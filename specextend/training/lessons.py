"""Lessons for a head, its loss on them, and how often it agrees with the target.

Shapes: `S` slots, `Q` asked, `C` hidden size, `V` draft vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from specextend.training.chain import Head, chain
from specextend.training.recording import Recording
from specextend.training.slots import Slots, lay_out

STEP_WEIGHTS = (1.0, 0.8)
"""Of the losses of the first and the second drafted token."""
PROMPT_SLOTS = 256
"""Slots of the prompt that a step asks for, beside all of the answers'."""


@dataclass(frozen=True, slots=True)
class HeadLesson:
    """A recording's slots and what the loss needs of the target."""

    slots: Slots
    shares: Tensor
    """[S] fp32: the target's probability of the draft vocabulary"""


def make_lesson(recording: Recording, lm_head: Tensor, vocabulary: Tensor) -> HeadLesson:
    """`lm_head` [tokens, C]; `vocabulary` [V] token ids."""
    slots, vocabulary = lay_out(recording), vocabulary.to(lm_head.device)
    shares = []
    for labels in slots.labels.split(256):
        logits = linear(labels.to(lm_head), lm_head).float()
        shares.append((logits[:, vocabulary].logsumexp(1) - logits.logsumexp(1)).exp().cpu())
    return HeadLesson(slots, torch.cat(shares))


def head_loss(head: Head, lesson: HeadLesson, generator: torch.Generator) -> Tensor:
    """Soft cross-entropy against the target over the draft vocabulary: mean over slots, summed over chain steps.

    A slot counts by the share of the target's probability that the vocabulary holds.
    """
    rows = head.target_rows
    slots, shares = lesson.slots.to(rows.device), lesson.shares.to(rows.device)
    asked = _asked(slots, generator)
    total = torch.zeros((), device=rows.device)
    with torch.autocast(rows.device.type, torch.bfloat16):
        for step, (hidden, at) in enumerate(chain(head, slots, asked, len(STEP_WEIGHTS))):
            weights = shares[at] * slots.follow(asked, step)
            wanted = linear(slots.labels[at].to(rows.dtype), rows).float().softmax(-1)
            logits = head.logits(hidden).float()
            losses = logits.logsumexp(-1) - (wanted * logits).sum(-1)
            total = total + STEP_WEIGHTS[step] * (losses * weights).sum() / weights.sum()
    return total


def _asked(slots: Slots, generator: torch.Generator) -> Tensor:
    """All slots of the answers and some of the prompt's, at random."""
    num_prompt = int((slots.groups == 0).sum())
    some = torch.randperm(num_prompt, generator=generator)[:PROMPT_SLOTS].sort().values
    return torch.cat([some, torch.arange(num_prompt, len(slots.groups))]).to(slots.groups.device)


@torch.inference_mode()
def agreement(
    head: Head, lessons: Sequence[HeadLesson], kinds: Sequence[str], lm_head: Tensor
) -> dict[str, list[float]]:
    """By kind of text, the share of tokens at which head and target have the same first choice, a step each.

    `kinds`: the name of each group of slots, the prompt's first. `lm_head` [tokens, C] of the target; a choice outside
    the draft vocabulary counts as missed.
    """
    same: Counter[tuple[str, int]] = Counter()
    count: Counter[tuple[str, int]] = Counter()
    for lesson in lessons:
        for step, groups, right in _judged(head, lesson.slots.to(lm_head.device), lm_head):
            for group in groups.unique().tolist():
                same[kinds[group], step] += int(right[groups == group].sum())
                count[kinds[group], step] += int((groups == group).sum())
    steps = range(len(STEP_WEIGHTS))
    return {name: [same[name, step] / max(1, count[name, step]) for step in steps] for name in dict.fromkeys(kinds)}


def _judged(head: Head, slots: Slots, lm_head: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Step, groups [n] and whether the choices are the same [n], of the slots asked whose chain holds."""
    asked = _asked(slots, torch.Generator().manual_seed(0))
    with torch.autocast(lm_head.device.type, torch.bfloat16):
        for step, (hidden, at) in enumerate(chain(head, slots, asked, len(STEP_WEIGHTS))):
            wanted = linear(slots.labels[at].to(lm_head.dtype), lm_head).argmax(-1)
            held = slots.follow(asked, step)
            yield step, slots.groups[asked][held], (head.vocabulary[head.logits(hidden).argmax(-1)] == wanted)[held]
