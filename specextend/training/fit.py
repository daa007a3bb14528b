"""The training loop: AdamW with a cosine schedule, one lesson a step, and a checkpoint to resume from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Say = Callable[[str], None]
"""Takes one line of progress."""
CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_S = 120.0
"""Seconds between two checkpoints."""
WARM_UP = 0.03
"""Share of the steps in which the learning rate rises."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW remembers of a parameter."""


def fit(
    module: nn.Module,
    loss: Callable[[Any, torch.Generator], Tensor],
    lessons: Sequence[Any],
    folder: Path,
    say: Say,
    *,
    passes: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train a module on every lesson `passes` times, from the folder's checkpoint on if there is one.

    loss: computes the loss of a lesson, with a generator seeded for the step. learning_rate: at its peak.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=learning_rate, betas=(0.9, 0.95))
    random, num_steps = Random(seed), passes * len(lessons)
    order = [number for _ in range(passes) for number in random.sample(range(len(lessons)), len(lessons))]
    if (first := _load(folder / CHECKPOINT, parameters, optimizer)) > 0:
        say(f"resuming at step {first}/{num_steps}")
    begun = saved_at = time.monotonic()
    losses = []
    for step in range(first, num_steps):
        found = loss(lessons[order[step]], torch.Generator().manual_seed(seed + step))
        _descend(optimizer, found, learning_rate * _rate(step, num_steps))
        losses.append(float(found.detach()))
        if len(losses) == max(1, len(lessons) // 4):
            mean, seconds = sum(losses) / len(losses), time.monotonic() - begun
            say(f"step {step + 1}/{num_steps}: loss {mean:.4f}, {seconds:.0f} s")
            losses = []
        if step + 1 == num_steps or time.monotonic() - saved_at > CHECKPOINT_S:
            _save(folder / CHECKPOINT, step + 1, parameters, optimizer)
            saved_at = time.monotonic()


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """Take one step down the gradient of a loss, at a learning rate."""
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
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


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
