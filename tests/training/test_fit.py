"""The training loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specextend.training.task import TrainOptions, fit

OPTIONS = TrainOptions(passes=3, learning_rate=1e-2)


class Learner:
    """A linear layer that learns sums of noisy numbers, and may be interrupted after some steps."""

    def __init__(self, folder: Path, num_steps: int | None = None) -> None:
        torch.manual_seed(0)
        self.layer, self.taken, self._folder, self._num_steps = nn.Linear(4, 1), 0, folder, num_steps
        self.shown: list[tuple[str, int, int]] = []

    def run(self) -> list[Tensor]:
        lessons = [torch.randn(4, generator=torch.Generator().manual_seed(n)) for n in range(5)]
        fit(self.layer, self._loss, lessons, self._folder, self.show, OPTIONS)
        return [parameter.detach().clone() for parameter in self.layer.parameters()]

    def show(self, stage: str, done: int, total: int, detail: str = "") -> None:
        self.shown.append((stage, done, total))

    def _loss(self, lesson: Tensor, chance: torch.Generator) -> Tensor:
        if self.taken == self._num_steps:
            raise KeyboardInterrupt
        self.taken += 1
        noisy = lesson + 0.1 * torch.randn(4, generator=chance)
        return (self.layer(noisy) - lesson.sum()).square().sum()


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path, monkeypatch):
    """To the bit: the order, what is drawn by chance, the learning rate and the optimizer's memory all go on."""
    monkeypatch.setattr("specextend.training.task.CHECKPOINT_S", 0.0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    expected = Learner(whole).run()
    for num_steps in (4, 5):
        with pytest.raises(KeyboardInterrupt):
            Learner(parts, num_steps).run()
    last = Learner(parts)
    found = last.run()
    assert last.shown[0] == ("training", 10, 15)
    assert last.taken == 6
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
