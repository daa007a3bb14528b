"""What the trainings of both kinds of heads share."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from specextend.training.chain import Head
from specextend.training.fit import Fit
from specextend.training.lessons import agreement, head_loss, make_lesson
from specextend.training.recording import Recording
from specextend.training.task import Task

HeadModule = TypeVar("HeadModule", bound=nn.Module)


def fit_head(task: Task, head: Any) -> None:
    """Train a head on what is to be learned."""
    lessons = [make_lesson(Recording.load(path), task.target.lm_head, head.vocabulary) for path in task.learned]
    fit = Fit(head, lambda lesson, chance: head_loss(head, lesson, chance), task.options.fit, task.work)
    fit.run(lessons, task.say)


def judge_head(task: Task, head: Head) -> dict[str, Any]:
    """How often a head agrees with the target where it has not learned."""
    lessons = [make_lesson(Recording.load(path), task.target.lm_head, head.vocabulary) for path in task.held]
    return {"agreement": agreement(head, lessons, task.groups(), task.target.lm_head)}
