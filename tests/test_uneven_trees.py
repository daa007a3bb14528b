"""A draft may propose trees of different sizes, and none at all: the engine pads a batch, and counts no padding."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
import torch

from specextend.decoding.tree import DraftTrees, among_roots, tree_mask
from specextend.stats import DecodingStats
from tests.reference_outputs import Ties
from tests.tiny_models import random_prompt, request, tiny_engine

LENGTHS = (300, 37, 129)
NEW = 40


@pytest.fixture(scope="module")
def pair(pairs):
    return pairs("llama")


def cut(trees: DraftTrees, sizes: list[int]) -> DraftTrees:
    """The first nodes of each tree, as many as `sizes` says; parents come first, so they are trees."""
    sizes = [min(size, of) for size, of in zip(sizes, trees.sizes, strict=True)]
    width = max(sizes)
    is_padding = torch.arange(width) >= torch.tensor(sizes)[:, None]
    values = (trees.token_ids, 0), (trees.parents, -1), (trees.depths, 0), (trees.log_probs, -inf)
    return DraftTrees(*(each[:, :width].masked_fill(is_padding, padding) for each, padding in values), sizes)


def engine_with_trees_cut(pair, draft: str, batch: int, sizes: list[int]):
    """An engine whose draft shows trees of random `sizes`, root included; and the draft tokens it showed."""
    engine = tiny_engine(pair, draft, decoding__max_batch_size=batch)
    propose, random, shown = engine.drafter.propose, Random(0), []

    def proposing(rows):
        trees = cut(propose(rows), [random.choice(sizes) for _ in rows])
        shown.extend(size - 1 for size in trees.sizes)
        return trees

    engine.drafter.propose = proposing
    return engine, shown


@pytest.mark.parametrize(("draft", "batch"), [("same", 1), ("same", 3), ("bad", 3), ("eagle", 3)])
def test_output_does_not_depend_on_the_sizes_of_trees(draft, batch, pair, references):
    """Padding that could be accepted would show here: token 0, below the root, is a token like any other."""
    engine, shown = engine_with_trees_cut(pair, draft, batch, [1, 2, 5, 9])
    total, ties = DecodingStats(), Ties()
    for completion in engine.generate([request(str(length), random_prompt(length), NEW) for length in LENGTHS]):
        ties.assert_equal(
            completion.token_ids, references("llama", int(completion.request_id), NEW), completion.request_id
        )
        total.add(completion.stats)
    assert not ties.found
    assert total.num_draft_tokens == sum(shown), "padding is no draft token"
    assert total.num_plain_steps == shown.count(0) > 0
    assert total.num_spec_steps == len(shown) - shown.count(0) > 0


def test_padding_attends_to_something_and_nobody_attends_to_it():
    """A row of a mask without a visible key gives NaN, and a visible padding row gives wrong logits."""
    token_ids, depths = torch.tensor([[7, 8, 9]]), torch.tensor([[0, 1, 2]])
    chain = DraftTrees(token_ids, depths - 1, depths, -depths / 10, [3])
    batch = among_roots(chain, [0], [7, 5])
    assert batch.token_ids.tolist() == [[7, 8, 9], [5, 0, 0]]
    assert batch.depths.tolist() == [[0, 1, 2], [0, 0, 0]]
    mask = tree_mask(batch.parents, 2)
    assert mask[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask[1].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
