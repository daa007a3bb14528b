"""Prompts in an engine: what they give, and what the target reads of them."""

from __future__ import annotations

from tests.tiny_models import request

NEW = 20
"""New tokens of each."""


def run(engine, *prompts):
    requests = [request(str(number), prompt, NEW) for number, prompt in enumerate(prompts)]
    return sorted(engine.generate(requests), key=lambda completion: int(completion.request_id))


def rows_read(engine) -> list[int]:
    """Records the tokens of each chunk that the target reads from now on."""
    forward, sizes = engine.target.forward_with_features, []

    def forward_and_count(token_ids, *rest):
        sizes.append(token_ids.shape[1])
        return forward(token_ids, *rest)

    engine.target.forward_with_features = forward_and_count
    return sizes
