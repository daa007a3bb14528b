"""All layers in one compiled call: what they compute one after the other."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba", reason="numba is the extra `cpu`")

from specextend.attention.compiled import phases
from specextend.attention.compiled.calls import Decoder
from specextend.decoding.layers import compiled_kernel
from tests.prophet import Prophet
from tests.reference_outputs import log_probs_after, tokens_of
from tests.tiny_models import (
    FAMILIES,
    Family,
    Pair,
    engine_with,
    load_reference,
    of_length,
    random_prompt,
    tiny_config,
    tiny_engine,
    tiny_model,
    write_eagle,
    write_model,
)

pytestmark = pytest.mark.skipif(compiled_kernel() is None, reason="the kernel needs a processor with AVX2")

SHAPES = {
    name: Family(config=FAMILIES[name].config, heads=(4, 2), head_dim=32) for name in ("llama", "qwen2-yarn", "qwen3")
}
"""Families whose products one call can take."""
LENGTHS = (700, 37, 129)
"""Tokens of prompts; the longest takes two chunks."""


@pytest.mark.parametrize(
    "family, scheme", [("llama", None), ("qwen2-yarn", None), ("qwen3", None), ("qwen2-yarn", "int8")]
)
def test_what_trees_of_a_batch_give_has_the_bits_of_plain_steps_and_is_exact(family, scheme, tmp_path):
    """Tokens, log probabilities and features, for biases, norms of heads and heads in groups.

    What speculation writes in bf16 is then what plain decoding would have written.
    """
    pair = Pair(write_model(tiny_model(SHAPES[family], seed=3, hidden_size=128), tmp_path), {})
    changes = {"target__dtype": "bfloat16", "target__quantize": scheme, "attention__tree": "dense"}
    asked = [replace(of_length(length, 24), keeps_log_probs=True) for length in LENGTHS]
    plain = {
        each.request_id: each
        for each in tiny_engine(pair, "ngram", decoding__mode="autoregressive", **changes).generate(asked)
    }
    prophet = Prophet({int(name): each.token_ids for name, each in plain.items()}, hidden_layers=(0, 2))
    engine = engine_with(tiny_config(pair, "ngram", decoding__max_batch_size=3, **changes), lambda _: prophet)
    assert engine.target.runs_in_one_call
    found = list(engine.generate(asked))
    assert tokens_of(found) == tokens_of(plain.values())
    assert {each.request_id: each.log_probs for each in found} == {name: each.log_probs for name, each in plain.items()}
    assert sum(each.stats.num_accepted_tokens for each in found) > 20
    exact = load_reference(pair).bfloat16().float()
    for each in found:
        [expected] = log_probs_after(exact, random_prompt(int(each.request_id)), [each.token_ids])
        print(
            family,
            scheme,
            (torch.tensor(each.log_probs) - expected).abs().mean(),
            (torch.tensor(each.log_probs) - expected).abs().max(),
            expected.mean(),
        )
    states = exact(torch.tensor([random_prompt(700)]), output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([states[1], states[3]], -1)[0]
    given = torch.cat(prophet.features[:2]).float()
    print(
        "features",
        [
            ((given[:, part] - features[:, part]).norm() / features[:, part].norm())
            for part in (slice(0, 128), slice(128, None))
        ],
        given.shape,
    )
    raise AssertionError


@pytest.mark.parametrize("fault", ["it cannot be made", "it is wrong"])
def test_it_is_taken_only_where_it_can_be_made_and_is_right(fault, monkeypatch):
    """It is made for the machine at hand, and a layer of it is tried there before any model runs on it."""
    run = Decoder.run

    def fail():
        raise RuntimeError("no compiler for this processor")

    if fault == "it is wrong":
        monkeypatch.setattr(Decoder, "run", lambda *call: (1.1 * run(*call)[0], []))
    else:
        monkeypatch.setattr(phases, "kernel", fail)
    compiled_kernel.cache_clear()
    assert compiled_kernel() is None
    compiled_kernel.cache_clear()


def noted_trees(engine, asked):
    """Decode; return for each tree, by slot and tokens before it, the path probabilities of its nodes."""
    drafter = engine.drafter
    read = drafter.read
    propose = drafter.propose
    counts = Counter()
    found = {}

    def count(slot, token_ids):
        counts[slot] += len(token_ids)
        read(slot, token_ids)

    def note(slots, *num_drafts):
        proposed = propose(slots, *num_drafts)
        for slot, nodes in zip(slots, proposed.nodes(), strict=True):
            paths = {-1: ()}
            for number, node in enumerate(nodes):
                paths[number] = (*paths[node.parent], node.token_id)
                assert node.depth == len(paths[number]) - 1
            found[slot, counts[slot]] = {paths[number]: node.log_prob for number, node in enumerate(nodes)}
        return proposed

    drafter.read = count
    drafter.propose = note
    list(engine.generate(asked))
    return found


@pytest.mark.parametrize("draft_vocab_size, copy_heads", [(64, 2), (64, None), (None, None)])
@pytest.mark.parametrize("threshold, depth", [(0.0, 4), (0.2, 4), (0.0, 1)])
def test_a_tree_that_grows_in_one_call_is_the_one_that_grows_level_by_level(
    threshold, depth, draft_vocab_size, copy_heads, tmp_path
):
    """But for nodes that are nearly as likely as others: its sums are rounded at other places."""
    model = tiny_model(SHAPES["llama"], seed=3, hidden_size=128, vocab_size=128)
    head = write_eagle(tmp_path / "head", model, draft_vocab_size, copy_heads)
    pair = Pair(write_model(model, tmp_path / "target"), {"eagle": head})
    tree = {"tree__nodes": 12, "tree__depth": depth, "tree__threshold": threshold}
    changes = {"target__dtype": "bfloat16", "decoding__max_batch_size": 2, **tree}
    joined, by_level = (tiny_engine(pair, "eagle", **changes) for _ in range(2))
    assert joined.drafter.network.at_once is not None
    joined.drafter.network.logits = None  # of a level, for which nobody may ask
    by_level.drafter.network.at_once = None
    expected, found = (noted_trees(engine, [of_length(20, 30), of_length(700, 30)]) for engine in (by_level, joined))
    shared = found.keys() & expected.keys()
    assert len(shared) > 20
    for key in shared:
        before, after = expected[key], found[key]
        both = {*before} & {*after}
        assert len(both) >= max(len(before), len(after)) - 3
        assert all(abs(before[path] - after[path]) < 0.5 for path in both)
