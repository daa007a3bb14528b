"""The method on one page, and the engine that does the same for a batch, with caches and kernels."""

import pytest
from transformers import AutoModelForCausalLM

from specextend.reference import generate
from tests.tiny_models import load_reference, random_prompt, request, tiny_engine

SIZES = {"num_nodes": 8, "max_depth": 4, "chunk_size": 8, "refresh_every": 3}


@pytest.mark.parametrize("policy, top_k_chunks", [("full", 1000), ("retrieval", 6)])
def test_the_method_on_one_page_and_the_engine_give_the_targets_tokens_in_as_many_steps(
    policy, top_k_chunks, pair, references
):
    """A draft that sees all is right more often than one that sees six chunks; this pair's attention is random."""
    prompt = random_prompt(300)
    draft = AutoModelForCausalLM.from_pretrained(pair.drafts["good"], attn_implementation="eager")
    found, accepted = generate(
        load_reference(pair), draft, prompt, max_new_tokens=40, top_k_chunks=top_k_chunks, **SIZES
    )
    engine = tiny_engine(pair, "good", cache__policy=policy, tree__threshold=0)
    [completion] = engine.generate([request("a", prompt, 40)])
    assert found == list(completion.token_ids) == list(references("llama", 300, 40).token_ids)
    if policy == "full":
        assert len(accepted) == completion.stats.num_spec_steps < 20
        assert sum(accepted) >= completion.stats.num_accepted_tokens
    else:
        assert sum(accepted) > 0
