"""The engine on the interpreted Triton kernel: `test_interpreted.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.reference_outputs import Ties, generate
from tests.tiny_models import FAMILIES, load_reference, random_prompt, request, tiny_engine, write_pair


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["auto", "hybrid"])
def test_output_is_the_targets_own(tree, tmp_path):
    """With heads that the kernel takes; by default a tree is one call, by `hybrid` two and a merge."""
    pair = write_pair(tmp_path, replace(FAMILIES["llama"], head_dim=64))
    changes = {"attention__backend": "triton", "attention__tree": tree, "decoding__max_batch_size": 2}
    changes |= {"tree__nodes": 4, "tree__depth": 2}
    requests = [request(str(length), random_prompt(length), 12) for length in (37, 129)]
    model, ties = load_reference(pair), Ties()
    for completion in tiny_engine(pair, **changes).generate(requests):
        reference = generate(model, random_prompt(int(completion.request_id)), 12)
        ties.assert_equal(completion.token_ids, reference, completion.request_id)
        assert completion.stats.num_spec_steps > 0
        assert (completion.stats.num_hybrid_steps > 0) == (tree == "hybrid")
    assert ties.num_compared == 2
    assert not ties.found
