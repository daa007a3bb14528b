"""A GPU waits for its host at each upload and download, and 7 to 10 us for each operator: a step may have few."""

from __future__ import annotations

import pytest

from tests.step_trace import StepTrace, tracing
from tests.tiny_models import random_prompt, request, tiny_engine


def traced_steps(pair, batch: int) -> list[StepTrace]:
    """Trace the speculative steps of a batch, in the fixed shapes of a GPU, up to the one in which the first ends."""
    changes = {"cache__policy": "full", "attention__backend": "reference"}
    engine = tiny_engine(pair, "good", decoding__max_batch_size=batch, **changes)
    engine.drafter.fixed_shapes = True
    with tracing(engine) as tracer:
        list(engine.generate([request(str(n), random_prompt(102 + n), 24) for n in range(batch)]))
    return [step for step in tracer.steps if step.num_sequences == batch][:-1]


@pytest.mark.parametrize(("batch", "operators", "downloads", "uploads"), [(1, 135, 1, 3), (3, 174, 1, 3)])
def test_a_step_has_few_operators_and_waits(batch, operators, downloads, uploads, pairs):
    """Eight nodes, four levels. `docs/log.md` says what the figures were before."""
    steps = traced_steps(pairs("llama"), batch)
    assert len(steps) >= 4
    for step in steps:
        assert step.operators.total() <= operators, step.operators
        assert step.num_downloads <= downloads
        assert step.num_uploads <= uploads
