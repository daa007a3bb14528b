"""All layers in one compiled call: what they compute one after the other."""

import copy
from itertools import pairwise

import pytest
import torch

pytest.importorskip("numba", reason="numba is the extra `cpu`")

from specextend.attention.backends import load_backend
from specextend.attention.compiled import calls, phases
from specextend.attention.compiled.calls import Decoder
from specextend.attention.plain import attend_reference
from specextend.attention.plan import AttentionPlan
from specextend.decoding.layers import compiled_kernel
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from tests.tiny_models import FAMILIES, Family, Pair, engine_with, tiny_config, tiny_model, write_eagle, write_model

pytestmark = pytest.mark.skipif(compiled_kernel() is None, reason="the kernel needs a processor with AVX2")

WITH_BIASES_OR_NORMS = {
    name: Family(config=FAMILIES[name].config, heads=(4, 2), head_dim=32) for name in ("llama", "qwen2-yarn", "qwen3")
}
TREE = torch.eye(9, dtype=torch.bool) | (torch.arange(9) == 0)


@pytest.fixture(params=[*((name, None) for name in WITH_BIASES_OR_NORMS), ("qwen2-yarn", "int8")])
def models(request):
    """A random model in fp32 and in bf16, the latter with products that one call can take."""
    family, scheme = request.param
    rounded = tiny_model(WITH_BIASES_OR_NORMS[family], seed=3, hidden_size=128).bfloat16()
    exact = CachedModel(copy.deepcopy(rounded).float(), attend_reference, 1024, quantize=scheme)
    return exact, CachedModel(rounded, load_backend("compiled", torch.device("cpu")), 1024, quantize=scheme)


def in_one_call(model):
    model.join_layers()
    assert model.runs_in_one_call
    return model


@torch.inference_mode()
def forwards(model, batch=2, kept=(0, 2), ends_only=False):
    """Return what sequences give and write: a chunk of a prompt, another one behind it, a tree and a plain step."""
    model.cache.stored[:] = 0
    generator = torch.Generator().manual_seed(0)
    results = []
    length = 0
    for num_new, mask in ((70, None), (130, None), (9, TREE.expand(batch, -1, -1)), (1, None)):
        length += num_new
        what = {"keep_layers": frozenset({1, 2}), "ends_only": ends_only and mask is None}
        plan = AttentionPlan([0, 512][:batch], [length] * batch, num_new, mask, "dense", **what)
        token_ids = torch.randint(0, 100, (batch, num_new), generator=generator)
        positions = torch.arange(length - num_new, length).expand(batch, -1)
        hidden, features = model.forward_with_features(token_ids, positions, plan, kept)
        results += [hidden, features, *plan.queries.values()]
    return [*results, model.cache.stored.clone()]


def test_it_is_as_exact_as_layer_after_layer(models):
    """Outputs, features and queries that are kept, and the cache, for biases, norms of heads and heads in groups."""
    exact, rounded = models
    expected = forwards(exact)
    plain = forwards(rounded)
    found = forwards(in_one_call(rounded))
    ratios = []
    for right, before, after in zip(expected, plain, found, strict=True):
        assert after.shape == right.shape
        ratios.append((after.float() - right).norm() / (before.float() - right).norm())
    assert max(ratios) < 3, "in a step of one token chance decides, on each processor otherwise"
    assert sum(ratios) < 1.25 * len(ratios)


@torch.inference_mode()
def test_a_worker_writes_only_to_its_memory(monkeypatch):
    """With AVX2 a gate of 512 inputs and 96 rows wrote 24 KiB after it, and broke the heap of a run."""
    guards = []
    own_memory = calls.working_memory

    def guarded(*sizes):
        counters, workspace, num_shares = own_memory(*sizes)
        memory = torch.zeros(workspace.numel() + (1 << 20), dtype=torch.uint8)
        guards.append(memory[workspace.numel() :])
        return counters, memory[: workspace.numel()].view_as(workspace), num_shares

    monkeypatch.setattr(calls, "working_memory", guarded)
    model = tiny_model(WITH_BIASES_OR_NORMS["llama"], seed=3, hidden_size=512).bfloat16()
    forwards(in_one_call(CachedModel(model, load_backend("compiled", torch.device("cpu")), 1024)))
    assert guards
    assert not torch.stack(guards).any()


@pytest.mark.parametrize("is_joined, batch", [(True, 1), (True, 2), (False, 2)])
def test_what_is_read_of_a_prompt_does_not_depend_on_what_is_not(is_joined, batch, models):
    """Keys, values, features and what each last token gives have the bits that they have where all is computed."""
    model = in_one_call(models[1]) if is_joined else models[0]
    whole = forwards(model, batch, (0, 1))
    ends = forwards(model, batch, (0, 1), ends_only=True)
    assert torch.equal(ends[-1], whole[-1])
    assert ends[0].shape[1] == 1
    rounding = 0 if is_joined else 1e-5
    for one, other in zip(whole, ends, strict=True):
        torch.testing.assert_close(other, one[:, -other.shape[1] :], rtol=rounding, atol=rounding)


@torch.inference_mode()
def test_a_node_of_a_tree_has_the_bits_of_a_plain_step(models):
    """Hidden states and logits: what speculation writes in bf16 is then what plain decoding would have written."""
    model = in_one_call(models[1])
    token_ids = torch.randint(0, 100, (1, 70 + len(TREE)), generator=torch.Generator().manual_seed(2))

    def run(first, tokens, mask=None):
        num_new = tokens.shape[1]
        places = first + torch.arange(num_new) if mask is None else first + mask.sum(-1) - 1
        plan = AttentionPlan([0], [first + num_new], num_new, mask, "dense")
        hidden = model.forward(tokens, places.view(1, -1), plan)
        return torch.cat([hidden, model.logits(hidden)], -1)

    prompt, root, *leaves = token_ids.split([70, *[1] * len(TREE)], 1)
    run(0, prompt)
    tree = run(70, token_ids[:, 70:], TREE[None])
    plain = [run(70, root), *(run(71, leaf) for leaf in leaves)]
    assert torch.equal(tree, torch.cat(plain, 1))


@pytest.mark.parametrize("fault", ["it cannot be made", "it is wrong"])
def test_it_is_taken_only_where_it_can_be_made_and_is_right(models, fault, monkeypatch):
    """It is made for the machine at hand, and a layer of it is tried there before any model runs on it."""
    run = Decoder.run

    def fail():
        raise RuntimeError("no compiler for this processor")

    model = in_one_call(models[1])
    assert ("int8" in model.trials[-1].why) == ("int8" in model.linears)
    if fault == "it is wrong":
        monkeypatch.setattr(Decoder, "run", lambda *call: (1.1 * run(*call)[0], []))
    else:
        monkeypatch.setattr(phases, "kernel", fail)
    compiled_kernel.cache_clear()
    assert compiled_kernel() is None
    compiled_kernel.cache_clear()


HEADS = {"copies": (None, 2), "copies for a list of tokens": (512, 2), "a list of tokens": (512, None)}
"""How many tokens a head proposes, and its copy heads."""


def drafter_of(folder, head, least_gain, depth, *, in_one_call):
    """Return the drafter of a random head."""
    model = tiny_model(WITH_BIASES_OR_NORMS["llama"], seed=5, vocab_size=2048, hidden_size=128)
    pair = Pair(write_model(model, folder / "target"), {"eagle": write_eagle(folder / "head", model, *HEADS[head])})
    tree = {"tree__nodes": 12, "tree__depth": depth, "tree__threshold": least_gain}
    config = tiny_config(pair, "eagle", target__dtype="bfloat16", decoding__max_batch_size=2, **tree)
    drafter = engine_with(config).drafter
    network = drafter.network
    network.cache.working.stored.normal_()  # what nobody may read
    if in_one_call:
        assert network.at_once is not None
        network.logits = None  # of a level, for which nobody may ask
    else:
        network.at_once = None
    return drafter


@torch.inference_mode()
def grown(drafter):
    """Return the path probabilities of the trees of two sequences that see other numbers of tokens.

    What was decided for the second one came in several steps, for which nobody asked for a tree.
    """
    generator = torch.Generator().manual_seed(9)
    for slot, (length, *ends) in enumerate([(20, 23), (30, 31, 35, 55)]):
        token_ids = torch.randint(0, 2048, (ends[-1],), generator=generator)
        features = torch.randn(len(token_ids), 128, generator=generator).bfloat16()
        assert drafter.admit(slot, length, 25)
        drafter.prefill(slot, token_ids[:length], features[:length])
        drafter.select(slot, torch.arange(length - 1))
        for begin, end in pairwise((length, *ends)):
            drafter.absorb([slot], Decided.pad([token_ids[begin:end].tolist()], [features[begin - 1 : end - 1]]))
    found = []
    for nodes in drafter.propose([0, 1]).nodes():
        paths = {-1: ()}
        for number, node in enumerate(nodes):
            paths[number] = (*paths[node.parent], node.token_id)
            assert node.depth == len(paths[number]) - 1
        found.append({paths[number]: node.log_prob for number, node in enumerate(nodes)})
    return found


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("least_gain, depth", [(0.0, 4), (0.2, 4), (0.0, 1)])
def test_a_tree_that_grows_in_one_call_is_the_one_that_grows_level_by_level(least_gain, depth, head, tmp_path):
    """But for nodes that are nearly as likely as others: its sums are rounded at other places."""
    expected, found = (
        grown(drafter_of(tmp_path / str(in_one_call), head, least_gain, depth, in_one_call=in_one_call))
        for in_one_call in (False, True)
    )
    for before, after in zip(expected, found, strict=True):
        assert len(after) == len(before) == 13
        both = {*before} & {*after}
        assert len(both) >= 11
        assert all(abs(before[path] - after[path]) < 0.2 for path in both)
