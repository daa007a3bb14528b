"""Training of EAGLE heads of either format: their shared layer, chains of drafted tokens, loss and evaluation.

The loss follows a head on its own output: its output for one slot replaces the target's features in the next, as in
drafting (arXiv 2503.01840, "training-time test").

Shapes: `S` slots, `Q` asked, `n` some slots, `C` hidden size, `H` query heads, `K` key heads, `D` head size, `V` draft
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from specextend.training.fit import Fit
from specextend.training.recording import Recording
from specextend.training.slots import SlotInputs, Slots, lay_out
from specextend.training.task import Task


class Head(Protocol):
    """A head that can be trained: it predicts the next hidden state from a slot's places and hidden state."""

    vocabulary: Tensor
    """[V] token ids of the logits"""
    target_rows: Tensor
    """[V, C] of the target's LM head"""

    def keys_values(self, places: SlotInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values [n, K, D] from the target's features [n, F] or the head's own output [n, C]."""

    def layer(self, places: SlotInputs, hidden: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Compute the output [n, C] of slots that see keys and values [m, K, D] where `visible` [n, m] is true."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, V] from outputs [n, C]."""


def chain(head: Head, slots: Slots, asked: Tensor, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a head on the slots `asked` [Q], then on the slots behind them with its own output as features.

    Yields, for each step, outputs [Q, C] and the slots [Q] with whose labels they are compared. Values of a chain that
    has left its group (`Slots.follow`) are meaningless.
    """
    keys, values = head.keys_values(slots.places, slots.hidden)
    visible = slots.visible(asked)
    hidden, own = slots.hidden[asked], torch.eye(len(asked), dtype=torch.bool, device=asked.device)
    for step in range(num_steps):
        at = (asked + step).clamp(max=len(slots.groups) - 1)
        places = slots.places.at(at)
        if step:  # a drafted slot sees the real slots up to its root's, and the drafted slots of its own chain
            drafted = head.keys_values(places, hidden)
            keys, values = torch.cat([keys, drafted[0]]), torch.cat([values, drafted[1]])
            visible = torch.cat([visible, own], 1)
        hidden = head.layer(places, hidden, keys, values, visible)
        yield hidden, at


class HeadTensors(nn.Module):
    """The trained tensors of a head in fp32, by the names of its format, and the operations on them."""

    def __init__(self, weights: Mapping[str, Tensor], head_dim: int, layer_eps: float, head_eps: float) -> None:
        """Take the tensors; `layer_eps` is for the norms inside the layer, `head_eps` for the others."""
        super().__init__()
        self._head_dim, self._layer_eps, self._head_eps = head_dim, layer_eps, head_eps
        named = {name.replace(".", "/"): nn.Parameter(weight.float()) for name, weight in weights.items()}
        self._tensors = nn.ParameterDict(named)

    def values(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name.replace("/", "."): weight.detach() for name, weight in self._tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear map: x [..., in] to [..., out]."""
        return linear(x, self._of(name))

    def heads(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear map and split its output into heads: x [..., in] to [..., heads, D]."""
        return self.linear(name, x).unflatten(-1, (-1, self._head_dim))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Apply an RMS norm in fp32."""
        eps = self._layer_eps if name.startswith("layer.") else self._head_eps
        return rms_norm(x.float(), (x.shape[-1],), self._of(name), eps)

    def finish(self, residual: Tensor, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Add attention of query [n, H, D] where `visible` [n, m] is true, then the MLP, to residual [n, C]."""
        q, k, v = (x.transpose(0, 1)[None].to(residual.dtype) for x in (query, keys, values))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=visible[None, None], enable_gqa=True)
        residual = residual + self.linear("layer.self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1))
        normed = self.norm("layer.post_attention_layernorm", residual)
        gated = silu(self.linear("layer.mlp.gate_proj", normed)) * self.linear("layer.mlp.up_proj", normed)
        return residual + self.linear("layer.mlp.down_proj", gated)

    def _of(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight".replace(".", "/")]


STEP_WEIGHTS = (1.0, 0.8)
"""Weights of the losses of the first and the second drafted token."""
PROMPT_SLOTS = 256
"""Number of prompt slots that a step asks for, beside all slots of the answers."""


@dataclass(frozen=True, slots=True)
class HeadLesson:
    """The slots of a recording, and how much of the target's probability the draft can express."""

    slots: Slots
    shares: Tensor
    """[S] fp32 probability that the target gives to the draft vocabulary."""


def make_lesson(recording: Recording, lm_head: Tensor, vocabulary: Tensor) -> HeadLesson:
    """Lay out a recording for a head that proposes `vocabulary` [V]; `lm_head` [tokens, C] is the target's."""
    slots, vocabulary = lay_out(recording), vocabulary.to(lm_head.device)
    shares = []
    for labels in slots.labels.split(256):
        logits = linear(labels.to(lm_head), lm_head).float()
        shares.append((logits[:, vocabulary].logsumexp(1) - logits.logsumexp(1)).exp().cpu())
    return HeadLesson(slots, torch.cat(shares))


def head_loss(head: Head, lesson: HeadLesson, generator: torch.Generator) -> Tensor:
    """Compute the soft cross-entropy against the target: mean over slots, weighted sum over chain steps.

    Each slot is weighted by the share of the target's probability that the draft vocabulary holds.
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
    """Choose all slots of the answers and a random subset of the prompt's."""
    num_prompt = int((slots.groups == 0).sum())
    some = torch.randperm(num_prompt, generator=generator)[:PROMPT_SLOTS].sort().values
    return torch.cat([some, torch.arange(num_prompt, len(slots.groups))]).to(slots.groups.device)


@torch.inference_mode()
def agreement(
    head: Head, lessons: Sequence[HeadLesson], kinds: Sequence[str], lm_head: Tensor
) -> dict[str, list[float]]:
    """Measure, by kind of text and chain step, the share of tokens at which head and target have the same first choice.

    `kinds` names each group of slots, the prompt's first. `lm_head` [tokens, C] is the target's; a choice outside the
    draft vocabulary counts as missed.
    """
    same: Counter[tuple[str, int]] = Counter()
    count: Counter[tuple[str, int]] = Counter()
    for lesson in lessons:
        for step, groups, right in _compare_choices(head, lesson.slots.to(lm_head.device), lm_head):
            for group in groups.unique().tolist():
                same[kinds[group], step] += int(right[groups == group].sum())
                count[kinds[group], step] += int((groups == group).sum())
    steps = range(len(STEP_WEIGHTS))
    return {name: [same[name, step] / max(1, count[name, step]) for step in steps] for name in dict.fromkeys(kinds)}


def _compare_choices(head: Head, slots: Slots, lm_head: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each step, of the asked slots whose chain holds, the groups [n] and where the choices are equal [n]."""
    asked = _asked(slots, torch.Generator().manual_seed(0))
    with torch.autocast(lm_head.device.type, torch.bfloat16):
        for step, (hidden, at) in enumerate(chain(head, slots, asked, len(STEP_WEIGHTS))):
            wanted = linear(slots.labels[at].to(lm_head.dtype), lm_head).argmax(-1)
            held = slots.follow(asked, step)
            yield step, slots.groups[asked][held], (head.vocabulary[head.logits(hidden).argmax(-1)] == wanted)[held]


def fit_head(task: Task, head: Any) -> None:
    """Train a head on the recordings to learn from."""
    lessons = [make_lesson(Recording.load(path), task.target.lm_head, head.vocabulary) for path in task.learned]
    fit = Fit(head, lambda lesson, chance: head_loss(head, lesson, chance), task.options.fit, task.work)
    fit.run(lessons, task.say)


def evaluate_head(task: Task, head: Head) -> dict[str, Any]:
    """Measure on the held-out recordings how often a head agrees with the target."""
    lessons = [make_lesson(Recording.load(path), task.target.lm_head, head.vocabulary) for path in task.held]
    return {"agreement": agreement(head, lessons, task.groups(), task.target.lm_head)}
