"""All layers in one compiled call: what they compute one after the other."""

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("numba", reason="numba is the extra `cpu`")

from specextend.attention.backends import load_backend
from specextend.attention.compiled import phases
from specextend.attention.compiled.calls import Decoder
from specextend.attention.plain import attend_reference
from specextend.attention.plan import AttentionPlan
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.layers import compiled_kernel, linear, pack
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.eagle_network import EagleNetwork
from specextend.drafters.formats import read_head, read_vocabulary, read_weights
from specextend.models.causal_lm import rope_frequencies
from tests.tiny_models import FAMILIES, Family, tiny_model

pytestmark = pytest.mark.skipif(compiled_kernel() is None, reason="the kernel needs a processor with AVX2")

WITH_BIASES_OR_NORMS = {
    name: Family(config=FAMILIES[name].config, heads=(4, 2), head_dim=32) for name in ("llama", "qwen2-yarn", "qwen3")
}
KEPT = (0, 2)
HEAD = Path(__file__).parents[2] / "models" / "smollm2-135m-eagle"
TREE = torch.eye(9, dtype=torch.bool) | (torch.arange(9) == 0)


@pytest.fixture(params=[*((name, None) for name in WITH_BIASES_OR_NORMS), ("qwen2-yarn", "int8")])
def models(request):
    """A random model in fp32 and in bf16, the latter with products that one call can take."""
    family, scheme = request.param
    rounded = tiny_model(WITH_BIASES_OR_NORMS[family], seed=3, hidden_size=128).bfloat16()
    exact = CachedModel(copy.deepcopy(rounded).float(), attend_reference, 1024, quantize=scheme)
    return exact, CachedModel(rounded, load_backend("compiled", torch.device("cpu")), 1024, quantize=scheme)


def in_one_call(model):
    model._decoder = Decoder(model.model.model.layers, model.scale)
    return model


@torch.inference_mode()
def forwards(model, batch=2, kept=KEPT, ends_only=False):
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
    assert rounded._decoder is not None
    for right, before, after in zip(expected, plain, found, strict=True):
        assert after.shape == right.shape
        assert (after.float() - right).norm() <= 1.5 * (before.float() - right).norm()


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

    def run(tokens, first, mask=None, positions=None):
        length = first + tokens.shape[1]
        places = torch.arange(first, length)[None] if positions is None else positions
        hidden = model.forward(tokens, places, AttentionPlan([0], [length], tokens.shape[1], mask, "dense"))
        return torch.cat([hidden, model.logits(hidden)], -1)

    run(token_ids[:, :70], 0)
    depths = TREE.sum(1) - 1
    tree = run(token_ids[:, 70:], 70, TREE[None], 70 + depths[None])
    root = run(token_ids[:, 70:71], 70)
    assert torch.equal(tree[0, 0], root[0, 0])
    for node in range(1, len(TREE)):
        assert torch.equal(tree[0, node], run(token_ids[:, 70 + node : 71 + node], 71)[0, 0])


@pytest.mark.parametrize("fault", ["it cannot be made", "it is wrong"])
def test_it_is_taken_only_where_it_can_be_made_and_is_right(models, fault, monkeypatch):
    """It is made for the machine at hand, and a layer of it is tried there before any model runs on it."""
    run = Decoder.run

    def fail():
        raise RuntimeError("no compiler for this processor")

    models[1].join_layers()
    assert models[1].runs_in_one_call
    assert ("int8" in models[1].trials[-1].why) == ("int8" in models[1].linears)
    if fault == "it is wrong":
        monkeypatch.setattr(Decoder, "run", lambda *call: (1.1 * run(*call)[0], []))
    else:
        monkeypatch.setattr(phases, "kernel", fail)
    compiled_kernel.cache_clear()
    assert compiled_kernel() is None
    compiled_kernel.cache_clear()


def head_of(in_one_call, without):
    """Return the shipped head in bf16 behind a random embedding, without some of its parts."""
    shape = read_head(HEAD)
    weights = read_weights(shape)
    vocabulary = read_vocabulary(shape)
    if "copies" in without:
        shape = replace(shape, copy_heads=0)
        weights = {name: weights[name][:, : shape.hidden_size] if "o_proj" in name else weights[name]
                   for name in weights if "copy" not in name}  # fmt: skip
    if "list of tokens" in without:
        vocabulary = None
    generator = torch.Generator().manual_seed(5)
    embedding = torch.nn.Embedding(shape.vocab_size, shape.hidden_size)
    weight = 0.1 * torch.randn(embedding.weight.shape, generator=generator)
    embedding.weight = torch.nn.Parameter(weight.bfloat16(), False)
    attend = load_backend("compiled", torch.device("cpu")) if in_one_call else attend_reference
    target = SimpleNamespace(
        attend=attend, device=torch.device("cpu"), dtype=torch.bfloat16, runs_in_one_call=in_one_call,
        logits=partial(torch.nn.functional.linear, weight=embedding.weight),
        model=torch.nn.ModuleDict({"lm_head": linear(embedding.weight)}),
    )  # fmt: skip
    pack(target.model)
    target.model.get_input_embeddings = lambda: embedding
    rope = rope_frequencies(shape.rope, shape.head_dim, "shipped")
    network = EagleNetwork(shape, weights, vocabulary, target, embedding.weight, (512, 512), rope)
    network.cache.working.stored.normal_(generator=generator)  # what nobody may read
    return network


@torch.inference_mode()
def grown(network, least_gain, depth):
    """Return the path probabilities of the trees of two sequences that see other numbers of tokens.

    What was decided for the second one came in several steps, for which nobody asked for a tree.
    """
    generator = torch.Generator().manual_seed(9)
    tree = TreeOptions(nodes=12, depth=depth, threshold=least_gain)
    drafter = CausalDrafter(network, tree, "dense", None, 2)
    for slot, (length, *ends) in enumerate([(20, 23), (30, 31, 35, 55)]):
        token_ids = torch.randint(0, 49152, (ends[-1],), generator=generator)
        features = torch.randn(len(token_ids), network.hidden_size, generator=generator).bfloat16()
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


@pytest.mark.parametrize("without", [(), ("copies",), ("list of tokens",)])
@pytest.mark.parametrize("least_gain, depth", [(0.0, 4), (0.2, 4), (0.0, 1)])
def test_a_tree_that_grows_in_one_call_is_the_one_that_grows_level_by_level(least_gain, depth, without):
    """But for nodes that are nearly as likely as others: its sums are rounded at other places."""
    joined = head_of(True, without)
    joined.logits = None  # of a level, for which nobody may ask
    expected = grown(head_of(False, without), least_gain, depth)
    found = grown(joined, least_gain, depth)
    for before, after in zip(expected, found, strict=True):
        assert len(after) == len(before) == 13
        both = {*before} & {*after}
        assert len(both) >= 11
        assert all(abs(before[path] - after[path]) < 0.15 for path in both)
