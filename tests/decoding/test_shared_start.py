"""A start that prompts share is read once, and nothing of a request tells that another one had it before."""

from __future__ import annotations

import pytest
import torch

from specextend.attention.backends import cpu_kernels
from specextend.decoding.device import CPU
from tests.covering import each_once_then_slow
from tests.decoding.prompts import rows_read, run
from tests.tiny_models import random_prompt, tiny_engine

DRAFTS = ("good", "eagle", "eagle3", "merged-eagle")
BACKENDS = ("reference", *cpu_kernels(32, torch.float32))
START = random_prompt(50, seed=1)


@pytest.mark.parametrize(("draft", "backend", "batch"), each_once_then_slow(DRAFTS, BACKENDS, [1, 3]))
def test_output_and_acceptance_are_those_of_whole_prompts(draft, backend, batch, pair, alone):
    """For the request that reads the start, for those that get the copy, and for one that begins otherwise."""
    prompts = [START + random_prompt(length) for length in (200, 3, 900)] + [random_prompt(70), [*START, 7]]
    changes = {"attention__backend": backend, "decoding__max_batch_size": batch, "cache__policy": "full"}
    whole = run(tiny_engine(pair, draft, **changes), *prompts)
    engine = tiny_engine(pair, draft, **changes)
    engine.share_start(START)
    shared = run(engine, *prompts)
    assert [each.token_ids for each in shared] == [alone(prompt) for prompt in prompts]
    assert [each.stats.num_prompt_tokens for each in shared] == [len(prompt) for prompt in prompts]
    for one, other in zip(shared, whole, strict=True):
        assert one.stats.acceptance_histogram == other.stats.acceptance_histogram


def test_a_long_start_is_shared_up_to_a_chunk(pair, alone):
    """An instruction with many examples; the rows that are kept stay small beside the cache."""
    start = random_prompt(CPU.prefill_chunk + 100)
    engine = tiny_engine(pair)
    engine.share_start(start)
    sizes = rows_read(engine)
    prompts = [start + random_prompt(30), random_prompt(300), start + random_prompt(40)]
    assert [each.token_ids for each in run(engine, *prompts)] == [alone(prompt) for prompt in prompts]
    assert [size for size in sizes if size >= 100] == [CPU.prefill_chunk, 130, 300, 140]
