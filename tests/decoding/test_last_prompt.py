"""A prompt that begins as the one before it is read from where they differ, and nothing of its output tells."""

from functools import cache

import pytest

from specextend.decoding.prefill import LEAST_REUSED
from tests.covering import each_once_then_slow
from tests.tiny_models import BACKENDS, random_prompt, request, tiny_engine

NEW = 20
"""New tokens of each prompt."""
DRAFTS = ("good", "eagle", "eagle3", "merged-eagle")
DOCUMENT = random_prompt(1100, seed=1)
"""Longer than a chunk of prefill."""
QUESTIONS = [random_prompt(length, seed=length) for length in (40, 3, 300)]
OTHER = random_prompt(500, seed=2)
PROMPTS = [OTHER, *(DOCUMENT + question for question in QUESTIONS), [*OTHER, 7], [*OTHER, 7]]
CACHED = [0, 0, 1100, 1100, 0, 500]


def run(engine, *prompts):
    requests = [request(str(number), prompt, NEW) for number, prompt in enumerate(prompts)]
    return sorted(engine.generate(requests), key=lambda completion: int(completion.request_id))


@pytest.fixture(scope="module")
def alone(pair):
    """What a prompt gives in an engine that has read nothing before, without a draft."""
    engine = tiny_engine(pair, decoding__mode="autoregressive")
    return cache(lambda *prompt: run(engine, [*prompt])[0].token_ids)


@pytest.mark.parametrize("draft, backend, batch", each_once_then_slow(DRAFTS, BACKENDS, [1, 3]))
def test_output_and_acceptance_are_those_of_whole_prompts(draft, backend, batch, pair, alone):
    changes = {"attention__backend": backend, "decoding__max_batch_size": batch, "cache__policy": "full"}
    engine = tiny_engine(pair, draft, **changes)
    reused = run(engine, *PROMPTS)
    assert [each.token_ids for each in reused] == [alone(*prompt) for prompt in PROMPTS]
    assert [each.stats.num_cached_tokens for each in reused] == CACHED
    assert [each.stats.num_prompt_tokens for each in reused] == [len(prompt) for prompt in PROMPTS]
    for one, prompt in zip(reused, PROMPTS, strict=True):
        if one.stats.num_cached_tokens:
            [whole] = run(engine, prompt)  # nothing is kept between two calls of `generate`
            assert one.stats.acceptance_histogram == whole.stats.acceptance_histogram


@pytest.mark.parametrize(
    "common, own, cached",
    [
        (LEAST_REUSED, 20, LEAST_REUSED),
        (LEAST_REUSED - 1, 20, 0),
        (400, 700, 400),
    ],
)
def test_a_short_beginning_is_read_again(common, own, cached, pair):
    """A template is; a long instruction is not."""
    engine = tiny_engine(pair, decoding__mode="autoregressive")
    start = DOCUMENT[:common]
    _, second = run(engine, [*start, 5, 5, 5], [*start, 6, *random_prompt(own - 1)])
    assert second.stats.num_cached_tokens == cached


def test_a_prompt_whose_reading_failed_is_not_taken_over(pair, alone):
    """Nor the one before it, whose rows may have been written meanwhile."""
    engine = tiny_engine(pair)
    forward = engine.target.forward_with_features
    calls = []

    def fail_in_the_second_document(token_ids, *rest):
        calls.append(token_ids)
        if token_ids.shape[1] == len(OTHER):
            raise RuntimeError("attention failed")
        return forward(token_ids, *rest)

    engine.target.forward_with_features = fail_in_the_second_document
    prompts = {"a": DOCUMENT, "fails": OTHER, "b": [*DOCUMENT, 9]}
    errors = []
    requests = [request(name, prompt, NEW) for name, prompt in prompts.items()]
    outputs = {each.request_id: each for each in engine.generate(requests, lambda name, _: errors.append(name))}
    assert errors == ["fails"]
    assert {name: each.token_ids for name, each in outputs.items()} == {name: alone(*prompts[name]) for name in "ab"}
    assert outputs["b"].stats.num_cached_tokens == 0
