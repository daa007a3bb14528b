"""The training loop: AdamW with a cosine schedule, one lesson a step, and a checkpoint to resume from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

Say = Callable[[str], None]
"""Takes one line of progress."""

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """Length and learning rate of a training."""

    passes: int = 8
    """Number of passes over the lessons."""
    learning_rate: float = 4e-4
    """Peak learning rate; the cosine ends at a twentieth of it."""
    warm_up: float = 0.03
    """Share of the steps in which the rate rises."""
    checkpoint_every_s: float = 120.0
    """Seconds between two checkpoints."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.passes < 1 or self.learning_rate <= 0 or not 0 <= self.warm_up < 1:
            raise ValueError("passes must be 1 or more, learning_rate above 0, warm_up from 0 to below 1")

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step as a factor of `learning_rate`."""
        warm = max(1, round(self.warm_up * num_steps))
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, num_steps - warm)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


class Fit:
    """Training of one module that can be interrupted and resumed from its folder."""

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, torch.Generator], Tensor],
        options: FitOptions,
        folder: Path,
    ) -> None:
        """Take the module and the function that computes the loss of a lesson with a generator seeded for the step."""
        self._loss, self._options, self._folder = loss, options, folder
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=options.learning_rate, betas=(0.9, 0.95))
        self._header = {"options": json.dumps(asdict(options), sort_keys=True)}
        self._step = 0

    def run(self, lessons: Sequence[Any], say: Say) -> None:
        """Learn every lesson `passes` times, starting at the checkpoint if there is one."""
        num_steps = self._options.passes * len(lessons)
        self._resume(num_steps, say)
        order = self._order(len(lessons))
        begun, saved_at, losses = time.monotonic(), time.monotonic(), []
        while self._step < num_steps:
            losses.append(self._learn(lessons[order[self._step]], num_steps))
            self._step += 1
            if len(losses) == max(1, len(lessons) // 4):
                mean, seconds = sum(losses) / len(losses), time.monotonic() - begun
                say(f"step {self._step}/{num_steps}: loss {mean:.4f}, {seconds:.0f} s")
                losses = []
            if time.monotonic() - saved_at > self._options.checkpoint_every_s:
                self._save(num_steps)
                saved_at = time.monotonic()
        self._save(num_steps)

    def _order(self, count: int) -> list[int]:
        """Shuffle the lessons anew for each pass, and return their numbers."""
        random = Random(self._options.seed)
        return [number for _ in range(self._options.passes) for number in random.sample(range(count), count)]

    def _learn(self, lesson: Any, num_steps: int) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * self._options.rate(self._step, num_steps)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(lesson, torch.Generator().manual_seed(self._options.seed + self._step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def _save(self, num_steps: int) -> None:
        """Write weights and the optimizer's moments atomically into one file."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            tensors |= {f"weight.{name}": parameter.detach()}
            tensors |= {f"{moment}.{name}": state[moment] for moment in ("exp_avg", "exp_avg_sq", "step")}
        temporary = self._folder / (CHECKPOINT + ".tmp")
        save_file(tensors, temporary, {**self._header, "step": str(self._step), "num_steps": str(num_steps)})
        temporary.replace(self._folder / CHECKPOINT)

    def _resume(self, num_steps: int, say: Say) -> None:
        """Load the checkpoint if there is one. Raises ValueError if it belongs to another training."""
        path = self._folder / CHECKPOINT
        if not path.exists():
            return
        with safe_open(path, "pt") as file:
            found = file.metadata()
            expected = {**self._header, "num_steps": str(num_steps)}
            if {key: found.get(key) for key in expected} != expected:
                raise ValueError(
                    f"{path} belongs to another training; choose another output folder, or delete it to start again"
                )
            for name, parameter in self._parameters.items():
                parameter.data.copy_(file.get_tensor(f"weight.{name}"))
                moments = {moment: file.get_tensor(f"{moment}.{name}") for moment in ("exp_avg", "exp_avg_sq")}
                self._optimizer.state[parameter] = {
                    **{moment: value.to(parameter.device) for moment, value in moments.items()},
                    "step": file.get_tensor(f"step.{name}"),
                }
        self._step = int(found["step"])
        say(f"resuming at step {self._step}/{num_steps}")
