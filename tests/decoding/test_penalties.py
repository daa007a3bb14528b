"""Penalties behind every node of a tree are those of a plain step behind the same tokens, and those of transformers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from specextend.decoding.sampling import Penalties
from tests.tiny_models import request

VOCABULARY = 5
TOKENS = st.integers(0, VOCABULARY - 1)
TEXTS = st.lists(TOKENS, min_size=1, max_size=30)
CPU = torch.device("cpu")


@st.composite
def trees(draw, root: int) -> tuple[list[int], list[int]]:
    """Token ids and parents, the root first; siblings may be equal, which a draft's never are."""
    token_ids, parents = [root], [-1]
    for node in range(1, draw(st.integers(1, 12))):
        parents.append(draw(st.integers(0, node - 1)))
        token_ids.append(draw(TOKENS))
    return token_ids, parents


def path(token_ids: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens from below the root to a node."""
    return [] if node == 0 else [*path(token_ids, parents, parents[node]), token_ids[node]]


def as_transformers(penalty: float, size: int) -> LogitsProcessorList:
    """In the order in which its `generate` has them."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    if size:
        processors.append(NoRepeatNGramLogitsProcessor(size))
    return processors


@given(TEXTS, TEXTS, st.sampled_from([0.5, 1.0, 1.3]), st.sampled_from([0, 1, 2, 3]), st.data())
@settings(max_examples=100, derandomize=True)
def test_logits_behind_a_node_are_those_of_transformers_behind_its_tokens(prompt, output, penalty, size, data):
    """Bit for bit, so that no seed can tell them apart. A token that occurs twice is penalised once."""
    options = {"repetition_penalty": penalty, "no_repeat_ngram_size": size}
    penalties = Penalties(request("a", prompt, **options), CPU)
    for token_id in output:
        penalties.extend([token_id])
    token_ids, parents = data.draw(trees(output[-1]))
    logits = torch.randn(len(token_ids) + 2, VOCABULARY, generator=torch.Generator().manual_seed(len(output)))
    scores = penalties.apply(logits, token_ids, parents)
    for node in range(len(token_ids)):
        text = prompt + output + path(token_ids, parents, node)
        expected = as_transformers(penalty, size)(torch.tensor([text]), logits[node : node + 1].clone())
        assert torch.equal(scores[node : node + 1], expected)
