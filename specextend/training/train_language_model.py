"""Training a small standalone LM: first on the text alone, then on the target's choices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from specextend.training.fit import Fit, FitOptions
from specextend.training.language_model import (
    Window,
    distillation_loss,
    new_language_model,
    recorded_windows,
    right_choices,
    row_of_token,
    save_language_model,
    text_loss,
    text_windows,
)
from specextend.training.recording import Recording
from specextend.training.task import Task

TEXT_BATCH = 2
"""Windows of a step on text."""
TEXT_RATE = 2e-3
"""Learning rate on text."""


def train_language_model(task: Task) -> dict[str, Any]:
    """Train, write and judge a model."""
    target, options, vocabulary = task.target, task.options, task.vocabulary
    assert vocabulary is not None
    rows, size = row_of_token(vocabulary, len(target.embedding)), options.language_model.positions
    torch.manual_seed(options.sample.seed)
    model = new_language_model(options.language_model, vocabulary, target.embedding.cpu(), target.name)
    model.config.update({"tokens_sha256": target.tokens_sha256})
    model.to(target.device)
    num_tokens = _read_text(task, model, rows) if options.text_passes else 0
    lm_head = target.lm_head[vocabulary]
    lessons = [
        window
        for number, path in enumerate(task.learned)
        for window in recorded_windows(Recording.load(path), rows, size, number)
    ]
    fit = Fit(model, lambda lesson, _: distillation_loss(model, lesson, lm_head), options.fit, task.work)
    fit.run(lessons, task.say)
    save_language_model(model, vocabulary, task.output)
    return {"text_tokens": num_tokens, **_judge(task, model, rows, vocabulary)}


def _read_text(task: Task, model: Any, rows: Tensor) -> int:
    """Learn from the text alone; returns its tokens."""
    size, fit = task.options.language_model.positions, task.options.fit
    windows = [window for text in task.corpus.token_ids() for window in text_windows(text, rows, size)]
    batches = [windows[i : i + TEXT_BATCH] for i in range(0, len(windows), TEXT_BATCH)]
    if batches:
        folder = task.work / "text"
        folder.mkdir(exist_ok=True)
        options = FitOptions(passes=task.options.text_passes, learning_rate=TEXT_RATE, seed=fit.seed)
        Fit(model, lambda batch, _: text_loss(model, batch), options, folder).run(batches, task.say)
    return len(windows) * size


@torch.inference_mode()
def _judge(task: Task, model: Any, rows: Tensor, vocabulary: Tensor) -> dict[str, Any]:
    """Loss and, by kind of answer, agreement with the target where nothing was learned."""
    same: Counter[str] = Counter()
    count: Counter[str] = Counter()
    losses, lm_head = [], task.target.lm_head
    names = task.groups()[1:]
    for path in task.held:
        recording = Recording.load(path)
        windows: list[Window] = recorded_windows(recording, rows, task.options.language_model.positions, 0)
        for name, window, answer in zip(names, windows, recording.answers, strict=True):
            losses.append(float(distillation_loss(model, window, lm_head[vocabulary])))
            right = right_choices(model, window, lm_head, vocabulary)[-len(answer.token_ids) :]
            same[name], count[name] = same[name] + int(right.sum()), count[name] + len(right)
    return {
        "loss": sum(losses) / len(losses),
        "agreement": {name: [same[name] / max(1, count[name])] for name in dict.fromkeys(names)},
    }
