"""Published EAGLE heads against a slow twin that reads the files by the format's own names, over whole texts.

Our own format is held to the head that is trained (`tests/training/test_parity.py`).
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specextend.attention.plain import attend_reference
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided, DraftTrees
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.eagle_network import EagleNetwork
from specextend.drafters.formats import read_head, read_vocabulary, read_weights
from specextend.models.causal_lm import load_causal_lm, rope_frequencies
from tests.covering import covering
from tests.models.conftest import edit_json
from tests.published_heads import HEAD_DIM, HEADS, KV_HEADS, WRITERS
from tests.tiny_models import (
    FAMILIES,
    engine_with,
    load_reference,
    random_prompt,
    request,
    tiny_config,
    tiny_engine,
    tiny_model,
    write_model,
    write_pair,
)

OPTIONS = TreeOptions(nodes=6, depth=3, threshold=0)


class SlowHead:
    """The formulas of the papers and of the formats' own models; each slot is computed again from the start."""

    def __init__(self, variant, folder, target):
        self.variant = variant
        self.w = load_file(f"{folder}/model.safetensors")
        queries = "self_attn.q_proj.weight"
        self.prefix = next(name.removesuffix(queries) for name in self.w if name.endswith(queries))
        config = json.loads(Path(f"{folder}/config.json").read_text())
        self.norm_output = config.get("norm_output", False)
        layer = config.get("transformer_layer_config", config)
        self.window = layer.get("sliding_window") if "layer_types" in layer else None
        keys = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
        self.rope = LlamaRotaryEmbedding(
            LlamaConfig(head_dim=HEAD_DIM, **{key: layer[key] for key in keys if layer.get(key)})
        )
        own = next((name for name in ("embed_tokens.weight", "model.embed_tokens.weight") if name in self.w), None)
        self.embedding = self.w[own] if own else target.model.embed_tokens.weight
        self.lm_head = self.w.get("lm_head.weight", target.lm_head.weight)

    def features(self, taken):
        """What takes the place of a previous output [n, C], from the target's features [n, F]."""
        if "fc_norm.2.weight" in self.w:
            each = enumerate(taken.chunk(3, -1))
            taken = torch.cat([self.norm(f"fc_norm.{number}", part) for number, part in each], -1)
        if "input_norm.weight" in self.w:
            taken = self.norm("input_norm", taken)
        return linear(taken, self.fc) if "3" in self.variant else taken

    @property
    def fc(self):
        return next(tensor for name, tensor in self.w.items() if name.endswith("fc.weight"))

    def __call__(self, token_ids, hidden, positions):
        """Output [n, C] at slots, causal, at RoPE `positions` [n]: of each one's next token [n], and of what `features`
        or this gave [n, C].
        """
        embedded = self.embedding[token_ids]
        if "3" in self.variant:
            normed = self.norm(f"{self.prefix}hidden_norm", hidden)
            inputs = torch.cat([self.norm(f"{self.prefix}input_layernorm", embedded), normed], -1)
            x = normed if self.variant == "speculators-eagle3" else hidden
        elif self.variant == "speculators-eagle":
            both = torch.cat([self.norm("embedding_layernorm", embedded), hidden], -1)
            x = linear(both, self.fc, self.w["fusion_fc.bias"])
            inputs = self.norm(f"{self.prefix}input_layernorm", x)
        else:
            x = inputs = linear(torch.cat([embedded, hidden], -1), self.fc, self.w.get("fc.bias"))
        output = self.layer(x, inputs, positions)
        return self.norm("norm", output) if self.norm_output else output

    def layer(self, x, inputs, positions):
        x = x + self.attention(inputs, positions)
        normed = self.norm(f"{self.prefix}post_attention_layernorm", x)
        gate, up, down = (self.w[f"{self.prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + linear(silu(linear(normed, gate)) * linear(normed, up), down)

    def attention(self, inputs, positions):
        q, k, v = (self.heads(name, inputs) for name in "qkv")
        cos, sin = (table[0] for table in self.rope(q, positions[None]))
        q, k = (x * cos + torch.cat([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1) * sin for x in (q, k))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
        hidden = torch.full_like(scores[0], -torch.inf)
        hidden = hidden.triu(1) if self.window is None else hidden.triu(1) + hidden.tril(-self.window)
        mixed = (scores + hidden).softmax(-1) @ v
        return linear(mixed.transpose(0, 1).flatten(1), self.w[f"{self.prefix}self_attn.o_proj.weight"])

    def heads(self, name, inputs):
        projection = f"{self.prefix}self_attn.{name}_proj"
        heads = linear(inputs, self.w[f"{projection}.weight"], self.w.get(f"{projection}.bias"))
        heads = heads.view(len(inputs), -1, HEAD_DIM).transpose(0, 1)
        own = f"{self.prefix}self_attn.{name}_norm"
        return self.norm(own, heads) if f"{own}.weight" in self.w else heads

    def norm(self, name, x):
        name = name if f"{name}.weight" in self.w else f"model.{name}"
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def log_probs(self, output):
        """[V] of the target's ids; -inf for those that the head has not."""
        last = {"speculators-eagle": "pre_lm_head_layernorm", "eagle1": None, "eagle1-biased": None}
        name = None if self.norm_output else last.get(self.variant, "norm")
        own = (linear(self.norm(name, output) if name else output, self.lm_head)).log_softmax(-1)
        if "d2t" not in self.w:
            return own
        everything = torch.full_like(self.w["t2d"], -torch.inf, dtype=torch.float32)
        everything[self.w["t2d"]] = own  # in the order of the ids, which d2t keeps
        return everything


class Case:
    """A drafter and its twin, on one random text."""

    def __init__(self, pair, variant, boundaries=()):
        """`boundaries`: hidden states of the target that the head was trained with; none: random ones."""
        model = load_causal_lm(pair.target, "float32", "cpu")
        model.lm_head.weight.mul_(4)  # sure of itself, so that trees are deep
        self.target = CachedModel(model, attend_reference, 256)
        head = read_head(pair.drafts[variant])
        layers = head.hidden_layers(model.config.num_hidden_layers)
        rope = rope_frequencies(head.rope, head.head_dim, "tiny")
        weights = read_weights(head)
        vocabulary = read_vocabulary(head)
        lm_head = model.lm_head.weight
        self.network = EagleNetwork(head, weights, vocabulary, self.target, lm_head, (4096, 4096), rope, layers)
        self.drafter = CausalDrafter(self.network, OPTIONS, "hybrid", None, num_slots=3)
        self.twin = SlowHead(variant, pair.drafts[variant], model)
        self.token_ids = torch.tensor(random_prompt(100))
        generator = torch.Generator().manual_seed(7)
        self.features = self.golden = torch.randn(100, 48 * (len(layers) or 1), generator=generator)
        if boundaries:
            reference = load_reference(pair)
            states = reference(self.token_ids[None], output_hidden_states=True).hidden_states
            self.golden = torch.cat([states[each] for each in boundaries], -1)[0]
            self.features = torch.cat([states[layer + 1] for layer in layers], -1)[0]

    def slow_log_probs(self, visible, path=()):
        """[V] log probs after the visible slots (slot i: token i + 1 and features i) and a path behind them."""
        positions = torch.arange(len(visible) + len(path))
        text = torch.cat([self.token_ids[: visible[-1] + 2], torch.tensor(path, dtype=torch.int64)])
        slots = torch.tensor([*visible, *range(visible[-1] + 1, len(text) - 1)])
        hidden = self.twin.features(self.golden[visible])
        for count in range(len(visible), len(slots) + 1):
            output = self.twin(text[slots[:count] + 1], hidden, positions[:count])
            hidden = torch.cat([hidden, output[-1:]])
        return self.twin.log_probs(output[-1])

    def prefill(self, row, length, chunk):
        """Prompt tokens up to `length`; the root that follows them is absorbed."""
        assert self.drafter.admit(row, length, 64)
        pieces = zip(self.token_ids[:length].split(chunk), self.features[:length].split(chunk), strict=True)
        for token_ids, features in pieces:
            self.drafter.prefill(row, token_ids, features)

    def absorb(self, rows, first, last):
        """Tokens [first, last) of the text, each with the features before it."""
        spans = list(zip(first, last, strict=True))
        token_ids = [self.token_ids[a:b].tolist() for a, b in spans]
        self.drafter.absorb(rows, Decided.pad(token_ids, [self.features[a - 1 : b - 1] for a, b in spans]))

    def assert_tree_is_the_twins(self, row, visible):
        """Every node's weight is the twin's, and the first level has the twin's best."""
        [tree] = self.drafter.propose([row])
        weights = [0.0]
        paths = [()]
        for node in range(1, len(tree.parents)):
            parent = int(tree.parents[node])
            token_id = int(tree.token_ids[node])
            weights.append(weights[parent] + float(self.slow_log_probs(visible, paths[parent])[token_id]))
            paths.append((*paths[parent], token_id))
        assert tree.log_probs.tolist() == pytest.approx(weights, abs=5e-4)
        assert (int(self.slow_log_probs(visible).argmax()),) in paths
        assert max(map(len, paths)) >= 2, "outputs of the head's own were used"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and a head in every format and variant."""
    folder = tmp_path_factory.mktemp("published")
    model = tiny_model(FAMILIES["llama"], 0)
    drafts = {name: write(folder / name, model) for name, write in WRITERS.items()}
    return SimpleNamespace(target=write_model(model, folder / "target"), drafts=drafts)


@pytest.mark.parametrize("variant, length, chunk", covering([*WRITERS], [1, 2, 40], [1, 7, 512]))
@torch.inference_mode()
def test_a_head_equals_its_twin(variant, length, chunk, pair):
    """Order of the concatenation, place of each norm, residual, what is fed back, ids: any slip changes a weight."""
    case = Case(pair, variant)
    case.prefill(0, length, chunk)
    case.drafter.select(0, torch.arange(length))
    case.absorb([0], [length], [length + 1])
    case.assert_tree_is_the_twins(0, list(range(length)))


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("ids", [{"eagle_config": {IDS: [2, 4, 5]}}, {"eagle_config": None, IDS: [1, 3, 4]}])
@torch.inference_mode()
def test_trees_are_golden_in_both_ways_of_counting_layers(ids, tmp_path):
    """The paper's low, middle and high features of eight layers: other ones gave right text, slowly, all night."""
    model = tiny_model(FAMILIES["llama"], 0, num_layers=8)
    head = WRITERS["eagle3"](tmp_path / "head", model)
    edit_json(tmp_path / "head" / "config.json", **ids)
    pair = SimpleNamespace(target=write_model(model, tmp_path / "target"), drafts={"eagle3": head})
    case = Case(pair, "eagle3", boundaries=(2, 4, 5))
    case.prefill(0, 40, 16)
    case.drafter.select(0, torch.arange(40))
    case.absorb([0], [40], [41])
    case.assert_tree_is_the_twins(0, list(range(40)))


@pytest.mark.parametrize("variant", WRITERS)
@torch.inference_mode()
def test_rounds_and_selections_equal_a_fresh_run(variant, pair):
    """Keys are kept before RoPE and turned to their slots, by each head's own frequencies."""
    case = Case(pair, variant)
    case.prefill(0, 40, 16)
    chosen = [*range(8), *range(24, 40)]
    case.drafter.select(0, torch.tensor(chosen))
    for first, last in itertools.pairwise([40, 41, 45, 46]):
        case.absorb([0], [first], [last])
        case.assert_tree_is_the_twins(0, [*(slot for slot in chosen if slot < 39), *range(39, last - 1)])


@torch.inference_mode()
def test_a_layer_with_a_window_sees_the_last_slots_alone(tmp_path):
    """Also of those that a retrieval chose, and along a path of the tree."""
    model = tiny_model(FAMILIES["llama"], 0)
    head = WRITERS["eagle3"](tmp_path / "head", model)
    edit_json(tmp_path / "head" / "config.json", layer_types=["sliding_attention"], sliding_window=7)
    case = Case(SimpleNamespace(target=write_model(model, tmp_path / "target"), drafts={"eagle3": head}), "eagle3")
    case.prefill(0, 40, 16)
    chosen = [*range(8), *range(36, 40)]
    case.drafter.select(0, torch.tensor(chosen))
    for first, last in itertools.pairwise([40, 41, 44]):
        case.absorb([0], [first], [last])
        case.assert_tree_is_the_twins(0, [*(slot for slot in chosen if slot < 39), *range(39, last - 1)])


@pytest.mark.parametrize("variant", ["eagle1", "eagle3"])
@torch.inference_mode()
def test_a_batch_of_unequal_rows_is_each_row_alone(pair, variant):
    """Rows absorb one, three and four tokens at once; padding must not reach a neighbour or the row itself."""
    case = Case(pair, variant)
    lengths = [5, 60, 31]
    news = [1, 4, 3]
    for row, length in enumerate(lengths):
        case.prefill(row, length, 16)
        case.drafter.select(row, torch.arange(length))
    case.absorb([0, 1, 2], lengths, [length + new for length, new in zip(lengths, news, strict=True)])
    together = [*case.drafter.propose([0, 1, 2])]
    for row, (length, new) in enumerate(zip(lengths, news, strict=True)):
        case.assert_tree_is_the_twins(row, list(range(length + new - 1)))
        [alone] = case.drafter.propose([row])
        assert torch.equal(together[row].token_ids, alone.token_ids)


class Clairvoyant:
    """Proposes two right tokens and a wrong one, and notes the features that the drafter behind it is given."""

    def __init__(self, drafter, token_ids):
        self.drafter = drafter
        self.token_ids = token_ids
        self.prefilled = []
        self.absorbed = []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def prefill(self, row, token_ids, hidden):
        self.prefilled.append(hidden)
        self.drafter.prefill(row, token_ids, hidden)

    def absorb(self, rows, decided):
        self.absorbed.append(decided.features[0, : len(decided.token_ids[0])])
        self.drafter.absorb(rows, decided)

    def propose(self, rows, num_drafts=None):
        assert self.drafter.propose(rows, num_drafts)
        done = sum(map(len, self.absorbed))
        root, *following = [*self.token_ids, 0, 0][done - 1 : done + 2]
        chain = torch.tensor([[root, *following, 0]])
        depths = torch.arange(4).unsqueeze(0)
        return DraftTrees(chain, depths - 1, depths, -depths.float(), [4])


@pytest.mark.parametrize("draft", ["eagle1", "eagle3"])
def test_the_engine_hands_over_the_features_before_each_token(draft, tmp_path):
    """Of prompts of several chunks and of accepted paths; wrong ones would cost acceptance and show nowhere else."""
    pair = write_pair(tmp_path, FAMILIES["llama"])
    prompt = random_prompt(600)
    [plain] = tiny_engine(pair, decoding__mode="autoregressive").generate([request("a", prompt, 24)])
    engine = engine_with(tiny_config(pair, draft), lambda drafter: Clairvoyant(drafter, plain.token_ids))
    seen = engine.drafter
    [completion] = engine.generate([request("a", prompt, 24)])
    assert completion.token_ids == plain.token_ids
    assert completion.stats.num_accepted_tokens >= 12
    with torch.inference_mode():
        text = torch.tensor([prompt + completion.token_ids])
        states = load_reference(pair)(text, output_hidden_states=True, use_cache=False).hidden_states
    # transformers' last entry is normed, so of the three layers' outputs two can be compared
    expected = states[-1][0] if draft == "eagle1" else torch.cat(states[1:3], -1)[0]
    prefilled, absorbed = (torch.cat(part)[:, : expected.shape[-1]] for part in (seen.prefilled, seen.absorbed))
    torch.testing.assert_close(prefilled, expected[:600], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(absorbed, expected[599 : 599 + len(absorbed)], atol=2e-4, rtol=1e-4)
