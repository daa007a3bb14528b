"""Whatever retrieval trusts, and however often it selects, output is the target's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import covering
from tests.reference_outputs import Ties
from tests.tiny_models import random_prompt, request, tiny_engine

PROMPT_LENGTHS = (300, 37, 129)
CHOICES: list[dict[str, Any]] = [
    {"score_layers": [0]},
    {"score_layers": [0, 1, -1], "refresh_every": 2},
    {"score_layers": [1], "refresh_every": 1},
    {"chunk_size": 7, "top_k_chunks": 7},
]


@pytest.fixture(scope="module")
def pair(pairs):
    return pairs("llama")


@pytest.mark.parametrize(("choice", "draft", "batch"), covering(CHOICES, ["good", "eagle"], [1, 3]))
def test_output_is_the_targets_own(choice, draft, batch, pair, references):
    """A selection decides what the draft sees, never what is said."""
    changes = {f"cache__{key}": value for key, value in choice.items()}
    engine = tiny_engine(pair, draft, decoding__max_batch_size=batch, **changes)
    ties, all_stats = Ties(), []
    for completion in engine.generate([request(str(n), random_prompt(n), 40) for n in PROMPT_LENGTHS[:batch]]):
        ties.assert_equal(
            completion.token_ids, references("llama", int(completion.request_id), 40), f"{choice}, {draft}"
        )
        all_stats.append(completion.stats)
    assert not ties.found
    assert sum(stats.num_retrievals for stats in all_stats) > batch
    assert min(stats.retrieval_coverage for stats in all_stats if stats.num_retrievals) < 0.95, (
        "much of the prompt is hidden, or this would prove little"
    )
