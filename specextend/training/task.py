"""A training's settings, what one of its rounds trains a head from, and the loop.

The loop is AdamW with a cosine schedule, one example in an optimizer step, and a checkpoint to resume from.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specextend.data.storage import atomic_output, resolve
from specextend.decoding.decoding_options import at_least
from specextend.decoding.device import multiplies_bf16
from specextend.models import TargetOptions

Show = Callable[..., None]
"""Takes the name of a stage, how much of it is done, of how much, and perhaps a detail that follows the numbers."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Settings of a whole training. Lengths are in tokens."""

    start_from: str = ""
    """Folder of a draft that `specextend train` made, to go on from with its shape and vocabulary; empty: a new one."""
    num_rounds: int = 4
    """Most rounds of answers, training and evaluation."""
    num_answers: int = 256
    """Own answers of the target that each round adds."""
    min_tokens: int = 1024
    """Shortest piece of a document that is answered; shorter documents are not used."""
    max_tokens: int = 5120
    """Longest piece of a document that is answered."""
    vocabulary: int = 8192
    """Number of tokens that the draft can propose: all special tokens and the most frequent tokens of the text."""
    copy_heads: int = 2
    """Number of KV heads that look up earlier occurrences of the last tokens."""
    num_epochs: int = 4
    """Epochs of each round over all recordings so far."""
    learning_rate: float = 4e-4
    """Peak learning rate."""
    seed: int = 0
    """Seed of pieces and training."""

    def __post_init__(self) -> None:
        least = {"copy_heads": 0, "vocabulary": 16}
        least |= dict.fromkeys(("num_rounds", "num_answers", "min_tokens", "num_epochs"), 1)
        for name, value in least.items():
            at_least(name, getattr(self, name), value)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")


@dataclass(frozen=True)
class Task:
    """The training of one round: what is frozen of the target, and what is learned from."""

    options: TrainOptions
    target: TargetOptions
    config: Any
    """The target's configuration of transformers."""
    vocabulary: Tensor
    """[V] int64 token ids that the draft proposes, ascending."""
    recordings: list[Path]
    """The examples."""
    start: Path | None
    """Folder of the draft to go on from; None: a new one."""
    folder: Path
    """Where the draft is written to, and the checkpoint of its training."""
    show: Show
    embedding: Tensor
    """[tokens, C]"""
    lm_head: Tensor
    """[tokens, C]"""
    final_norm: Tensor
    """[C]"""


def frozen_weights(model: Any, lm_head: Tensor) -> list[Tensor]:
    """Copy embedding, LM head and last norm of a loaded target, as fp32 where products of bf16 are slow."""
    dtype = lm_head.dtype if multiplies_bf16(lm_head.device) else torch.float32
    weights = model.get_input_embeddings().weight, lm_head, model.model.norm.weight
    return [weight.detach().to(dtype, copy=True) for weight in weights]


TRAINING, CHECKPOINT = "training", "checkpoint.safetensors"
"""Folder and file in the draft's folder from which an interrupted training goes on."""
CHECKPOINT_S = 120.0
"""Seconds between two checkpoints."""
WARM_UP = 0.03
"""Share of the steps in which the learning rate rises."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW remembers of a parameter."""


def fit(head: nn.Module, loss: Callable[[Path, torch.Generator], Tensor], task: Task) -> None:
    """Train a head on the task's recordings for `num_epochs`, from the checkpoint on if there is one.

    loss: computes the loss of a recording, with a generator seeded for the step.
    """
    options, examples, checkpoint = task.options, task.recordings, task.folder / TRAINING / CHECKPOINT
    parameters = {name: p for name, p in head.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=options.learning_rate, betas=(0.9, 0.95))
    random, num_steps = Random(options.seed), options.num_epochs * len(examples)
    order = [each for _ in range(options.num_epochs) for each in random.sample(examples, len(examples))]
    saved_at = time.monotonic()
    losses: deque[float] = deque(maxlen=max(1, len(examples) // 4))
    for step in range(_load(checkpoint, parameters, optimizer), num_steps):
        found = loss(order[step], torch.Generator().manual_seed(options.seed + step))
        _optimizer_step(optimizer, found, options.learning_rate * _rate(step, num_steps))
        losses.append(float(found.detach()))
        task.show("training", step + 1, num_steps, f", loss {sum(losses) / len(losses):.4f}")
        if step + 1 == num_steps or time.monotonic() - saved_at > CHECKPOINT_S:
            _save(checkpoint, step + 1, parameters, optimizer)
            saved_at = time.monotonic()


def _optimizer_step(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """Take one optimizer step on a loss, at a learning rate."""
    [group] = optimizer.param_groups
    group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()


def _rate(step: int, num_steps: int) -> float:
    """Return the learning rate of a step as a factor of the peak; the cosine ends at a twentieth of it."""
    warm = max(1, round(WARM_UP * num_steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _save(path: Path, step: int, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write the weights and the optimizer's moments after `step` steps, whole or not at all."""
    tensors = {"step": torch.tensor(step)}
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = parameter.detach()
        tensors |= {f"{moment}/{name}": optimizer.state[parameter][moment] for moment in _MOMENTS}
    with atomic_output(resolve(str(path))) as temporary:
        save_file(tensors, temporary)


def _load(path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Load what `_save` wrote, and return the number of steps; 0 if there is no checkpoint."""
    if not path.exists():
        return 0
    tensors = load_file(path)
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[f"weight/{name}"])
        moments = {moment: tensors[f"{moment}/{name}"] for moment in _MOMENTS}
        device = parameter.device
        optimizer.state[parameter] = {m: x if m == "step" else x.to(device) for m, x in moments.items()}
    return int(tensors["step"])
