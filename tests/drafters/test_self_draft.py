"""The target as its own draft: what it sees is its own cache, and only as much of it as it is shown."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.attention.torch_kernels import attend_by_head
from specextend.decoding.cache import Region
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from specextend.drafters.self_draft import SelfDrafter
from specextend.models import load_causal_lm
from tests.tiny_models import load_reference, random_prompt, request, tiny_engine

LENGTH, ROOT = 120, 7


def read_target(pair, prompt: list[int]) -> CachedModel:
    """A target whose cache holds a prompt in the rows of slot 0, which do not begin at 0."""
    target = CachedModel(load_causal_lm(pair.target, None, "float32", "cpu"), attend_by_head, 512)
    target.cache.regions[0] = Region(256, 256)
    positions = torch.arange(len(prompt)).unsqueeze(0)
    target.forward(torch.tensor([prompt]), positions, AttentionPlan([256], [len(prompt)], len(prompt)))
    return target


def own_log_probs(pair, prompt: list[int], visible: Tensor, path: list[int]) -> Tensor:
    """Log probabilities [V] after a path by transformers alone: the prompt read as ever, the path with a mask."""
    model, count = load_reference(pair), len(path)
    cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    mask = torch.full((count, len(prompt) + count), -torch.inf)
    mask[:, visible] = 0
    mask[:, len(prompt) :] = torch.zeros(count, count).masked_fill_(torch.ones(count, count).triu(1).bool(), -torch.inf)
    positions = torch.arange(len(prompt), len(prompt) + count).unsqueeze(0)
    logits = model(
        torch.tensor([path]), attention_mask=mask[None, None], position_ids=positions, past_key_values=cache
    ).logits
    return logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "mistral-yarn"])
@torch.inference_mode()
def test_it_drafts_what_the_target_says_with_the_rest_of_its_cache_hidden(family, pairs):
    """The rows are the target's own, at their own positions: nothing is computed anew, and nothing else is seen."""
    pair, prompt = pairs(family), random_prompt(LENGTH)
    drafter = SelfDrafter(read_target(pair, prompt), TreeOptions(nodes=12, depth=3, threshold=0), 512, None)
    visible = torch.tensor([*range(8), *range(40, 56), *range(100, LENGTH)])
    assert drafter.admit(0, LENGTH, 16)
    drafter.prefill(0, torch.tensor(prompt), torch.zeros(LENGTH, 48))
    drafter.select(0, visible)
    drafter.absorb([0], Decided.pad([[ROOT]], [torch.zeros(1, 48)]))
    [tree] = drafter.propose([0])
    assert len(tree.token_ids) == 13
    path, node = [ROOT], 0
    while (children := (tree.parents == node).nonzero().flatten()).numel():
        expected = own_log_probs(pair, prompt, visible, path)[tree.token_ids[children]]
        found = tree.log_probs[children] - tree.log_probs[node]
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
        node = int(children[0])
        path.append(int(tree.token_ids[node]))
    assert len(path) > 2


@pytest.mark.parametrize("batch", [1, 3])
def test_a_target_that_sees_everything_agrees_with_itself(batch, pairs):
    """Every level is then accepted: not only is the output right, the views of a batch are the right ones, too."""
    engine = tiny_engine(
        pairs("mistral"), "self", cache__policy="full", tree__threshold=0, decoding__max_batch_size=batch
    )
    for completion in engine.generate(request(str(n), random_prompt(n), 41) for n in (300, 37, 129)):
        assert completion.stats.acceptance_histogram == [0, 0, 0, 0, 8]
