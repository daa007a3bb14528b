"""A small LM as the draft: tokens that only one side knows."""

import pytest
import torch

from specextend.attention.torch_kernels import attend_by_head
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.lm_networks import ModelNetwork
from specextend.models.causal_lm import load_causal_lm
from tests.tiny_models import EOS_TOKEN_ID, NUM_CUT, VOCABULARY, random_prompt

OPTIONS = TreeOptions(nodes=40, depth=3, threshold=0)


@pytest.mark.parametrize("family", ["llama", "qwen3-tied-linear"])
@pytest.mark.parametrize("draft, num_rows", [("cut", VOCABULARY - NUM_CUT), ("bad", VOCABULARY + 8)])
@torch.inference_mode()
def test_a_draft_with_other_rows_proposes_what_both_have_and_reads_the_rest_as_the_end_of_a_text(
    draft, num_rows, family, pairs
):
    """A token that only one side knows must neither crash nor be proposed: the target could not even embed it."""
    model = CachedModel(load_causal_lm(pairs(family).drafts[draft], "float32", "cpu"), attend_by_head, 2048)
    network = ModelNetwork(model, 8, 64, num_shared=min(num_rows, VOCABULARY), other_id=EOS_TOKEN_ID)
    drafter = CausalDrafter(network, OPTIONS, "hybrid", None, 1)
    text = random_prompt(60)
    known = [token_id if token_id < num_rows else EOS_TOKEN_ID for token_id in text]
    assert (text != known) == (draft == "cut")
    found = drafted(drafter, text)
    assert found == drafted(drafter, known)
    assert max(found[41:]) < min(num_rows, VOCABULARY)


def drafted(drafter, prompt):
    """Draft for one prompt, from admission to release; return its tree."""
    assert drafter.admit(0, len(prompt), 32)
    drafter.prefill(0, torch.tensor(prompt), torch.zeros(len(prompt), 0))
    drafter.select(0, torch.arange(len(prompt)))
    drafter.read_selected([0])
    drafter.absorb([0], Decided.pad([[5]], [torch.zeros(1, 0)]))
    [tree] = drafter.propose([0])
    drafter.release(0)
    return [*tree.log_probs.tolist(), *tree.token_ids.tolist()]
