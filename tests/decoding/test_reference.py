"""The method on one page, and the engine that does the same for a batch, with caches and kernels."""

from collections import Counter

import pytest
from transformers import AutoModelForCausalLM

from specextend.reference import generate
from tests.tiny_models import load_reference, random_prompt, request, tiny_engine

ONCE = 1000


@pytest.mark.parametrize(
    "family, policy, top_k_chunks, refresh_every",
    [
        ("llama", "full", 99, ONCE),
        ("llama", "retrieval", 6, ONCE),
        ("llama", "retrieval", 6, 3),
        ("mistral-yarn", "retrieval", 6, ONCE),
    ],
)
def test_the_method_on_one_page_and_the_engine_accept_as_much_in_as_many_steps(
    family, policy, top_k_chunks, refresh_every, pairs, references
):
    """After a choice at equal intervals, too, though the engine keeps the rows of chunks that stay.

    A draft reads what it sees as a text; it used to read the whole prompt, only to hide most of it.
    """
    pair = pairs(family)
    seen = {"chunk_size": 8, "recent": 8, "top_k_chunks": top_k_chunks, "refresh_every": refresh_every}
    prompt = random_prompt(300)
    draft = AutoModelForCausalLM.from_pretrained(pair.drafts["good"], attn_implementation="eager")
    found, accepted = generate(load_reference(pair), draft, prompt, max_new_tokens=40, num_nodes=8, max_depth=4, **seen)
    options = {f"cache__{name}": value for name, value in seen.items()}
    engine = tiny_engine(pair, "good", cache__policy=policy, tree__threshold=0, **options)
    read = engine.drafter.read_selected
    counts = []

    def note(slots):
        counts.append(read(slots))
        return counts[-1]

    engine.drafter.read_selected = note
    [completion] = engine.generate([request("a", prompt, 40)])
    assert found == list(completion.token_ids) == list(references(family, 300, 40).token_ids)
    histogram = enumerate(completion.stats.acceptance_histogram)
    assert Counter(accepted) == Counter({number: steps for number, steps in histogram if steps})
    assert completion.stats.num_retrievals == (policy == "retrieval") * -(-len(accepted) // refresh_every)
    whole, *later = counts
    assert whole == (300 if policy == "full" else pytest.approx(8 * top_k_chunks, abs=8))
    assert not later or sum(later) / len(later) < 0.8 * whole, "chunks that stay are not read again"
