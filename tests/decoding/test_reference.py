"""The method on one page, and the engine that does the same for a batch, with caches and kernels."""

from collections import Counter

import pytest
from transformers import AutoModelForCausalLM

from specextend.reference import generate
from tests.tiny_models import load_reference, random_prompt, request, tiny_engine

ONCE = 1000


@pytest.mark.parametrize(
    "policy, top_k_chunks, refresh_every", [("full", 99, ONCE), ("retrieval", 6, ONCE), ("retrieval", 6, 3)]
)
def test_the_method_on_one_page_and_the_engine_accept_as_much_in_as_many_steps(
    policy, top_k_chunks, refresh_every, pair, references
):
    """After a choice at equal intervals, too, though the engine keeps the rows of chunks that stay."""
    seen = {"chunk_size": 8, "recent": 8, "top_k_chunks": top_k_chunks, "refresh_every": refresh_every}
    prompt = random_prompt(300)
    draft = AutoModelForCausalLM.from_pretrained(pair.drafts["good"], attn_implementation="eager")
    found, accepted = generate(load_reference(pair), draft, prompt, max_new_tokens=40, num_nodes=8, max_depth=4, **seen)
    options = {f"cache__{name}": value for name, value in seen.items()}
    engine = tiny_engine(pair, "good", cache__policy=policy, tree__threshold=0, **options)
    [completion] = engine.generate([request("a", prompt, 40)])
    assert found == list(completion.token_ids) == list(references("llama", 300, 40).token_ids)
    histogram = enumerate(completion.stats.acceptance_histogram)
    assert Counter(accepted) == Counter({number: steps for number, steps in histogram if steps})
    assert completion.stats.num_retrievals == (policy == "retrieval") * -(-len(accepted) // refresh_every)
