"""Lessons for an EAGLE head, its loss on them, and how often it agrees with the target.

Shapes: `S` slots, `Q` asked, `C` hidden size, `V` draft vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from specextend.training.eagle import EagleHead
from specextend.training.recording import Recording
from specextend.training.slots import Slots, lay_out

STEP_WEIGHTS = (1.0, 0.8)
"""Of the losses of the first and the second drafted token."""
PROMPT_SLOTS = 256
"""Slots of the prompt that a step asks for, beside all of the answers'."""


@dataclass(frozen=True, slots=True)
class EagleLesson:
    """A recording's slots and what the loss needs of the target."""

    slots: Slots
    shares: Tensor
    """[S] fp32: the target's probability of the draft vocabulary"""


def make_lesson(recording: Recording, lm_head: Tensor, vocabulary: Tensor | None) -> EagleLesson:
    """`lm_head` [tokens, C]; `vocabulary` [V] token ids, None for all."""
    slots = lay_out(recording)
    if vocabulary is None:
        return EagleLesson(slots, torch.ones(len(slots.labels)))
    shares = []
    for labels in slots.labels.split(256):
        logits = linear(labels.to(lm_head.dtype), lm_head).float()
        shares.append((logits[:, vocabulary].logsumexp(1) - logits.logsumexp(1)).exp())
    return EagleLesson(slots, torch.cat(shares))


def eagle_loss(head: EagleHead, lesson: EagleLesson) -> Tensor:
    """Soft cross-entropy against the target over the draft vocabulary: mean over slots, summed over chain steps.

    A slot counts by the share of the target's probability that the vocabulary holds.
    """
    slots, shares = lesson.slots.to(head.device), lesson.shares.to(head.device)
    asked = _asked(slots)
    total = torch.zeros((), device=head.device)
    with torch.autocast(head.device.type, torch.bfloat16):
        for step, (logits, at) in enumerate(head.chain(slots, asked, len(STEP_WEIGHTS))):
            weights = shares[at] * slots.follow(asked, step)
            wanted = linear(slots.labels[at].to(head.lm_head.dtype), head.lm_head).float().softmax(-1)
            losses = logits.float().logsumexp(-1) - (wanted * logits.float()).sum(-1)
            total = total + STEP_WEIGHTS[step] * (losses * weights).sum() / weights.sum()
    return total


def _asked(slots: Slots) -> Tensor:
    """All slots of the answers and some of the prompt's, at random."""
    num_prompt = int((slots.groups == 0).sum())
    some = torch.randperm(num_prompt)[:PROMPT_SLOTS].sort().values
    return torch.cat([some, torch.arange(num_prompt, len(slots.groups))]).to(slots.groups.device)


@torch.inference_mode()
def agreement(
    head: EagleHead, lessons: Sequence[EagleLesson], kinds: Sequence[str], lm_head: Tensor
) -> dict[str, list[float]]:
    """By kind of text, the share of tokens at which head and target have the same first choice, a step each.

    `kinds`: the name of each group of slots, the prompt's first. `lm_head` [tokens, C] of the target; a choice outside
    the draft vocabulary counts as missed.
    """
    same: Counter[tuple[str, int]] = Counter()
    count: Counter[tuple[str, int]] = Counter()
    for lesson in lessons:
        for step, groups, right in _judged(head, lesson.slots.to(head.device), lm_head):
            for group in groups.unique().tolist():
                same[kinds[group], step] += int(right[groups == group].sum())
                count[kinds[group], step] += int((groups == group).sum())
    steps = range(len(STEP_WEIGHTS))
    return {name: [same[name, step] / max(1, count[name, step]) for step in steps] for name in dict.fromkeys(kinds)}


def _judged(head: EagleHead, slots: Slots, lm_head: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Step, groups [n] and whether the choices are the same [n], of the slots asked whose chain holds."""
    asked = _asked(slots)
    with torch.autocast(head.device.type, torch.bfloat16):
        for step, (logits, at) in enumerate(head.chain(slots, asked, len(STEP_WEIGHTS))):
            wanted = linear(slots.labels[at].to(lm_head.dtype), lm_head).argmax(-1)
            held = slots.follow(asked, step)
            yield step, slots.groups[asked][held], (head.token_ids(logits.argmax(-1)) == wanted)[held]
