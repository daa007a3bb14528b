"""Published EAGLE heads against a slow twin that reads the files by the format's own names, over whole texts.

Our own format is held to the head that is trained (`tests/training/test_parity.py`).
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specextend.attention.plain import attend_reference
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.eagle_network import EagleNetwork
from specextend.drafters.formats import read_head, read_vocabulary, read_weights
from specextend.models.causal_lm import load_causal_lm, rope_frequencies
from tests.covering import covering
from tests.models.conftest import edit_json
from tests.published_heads import HEAD_DIM, WRITERS
from tests.tiny_models import FAMILIES, Pair, random_prompt, tiny_model, write_model

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
        q, k, v = (self.heads(name, inputs)[None] for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self.rope(q, positions[None]))
        seen = torch.ones(len(inputs), len(inputs), dtype=torch.bool).tril()
        if self.window is not None:
            seen = seen.triu(1 - self.window)
        mixed = scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0]
        return linear(mixed.transpose(0, 1).flatten(1), self.w[f"{self.prefix}self_attn.o_proj.weight"])

    def heads(self, name, inputs):
        projection = f"{self.prefix}self_attn.{name}_proj"
        heads = linear(inputs, self.w[f"{projection}.weight"], self.w.get(f"{projection}.bias"))
        heads = heads.view(len(inputs), -1, HEAD_DIM).transpose(0, 1)
        own = f"{self.prefix}self_attn.{name}_norm"
        return self.norm(own, heads) if f"{own}.weight" in self.w else heads

    def norm(self, name, x):
        name = name if f"{name}.weight" in self.w else f"model.{name}"
        return rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], 1e-5)

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

    def __init__(self, network, twin, num_features):
        self.network = network
        self.drafter = CausalDrafter(network, OPTIONS, "hybrid", None, num_slots=3)
        self.twin = twin
        self.token_ids = torch.tensor(random_prompt(100))
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(100, num_features, generator=generator)

    @classmethod
    def of_head(cls, pair, variant):
        model = load_causal_lm(pair.target, "float32", "cpu")
        model.lm_head.weight.mul_(4)  # sure of itself, so that trees are deep
        target = CachedModel(model, attend_reference, 256)
        head = read_head(pair.drafts[variant])
        layers = head.hidden_layers(model.config.num_hidden_layers)
        rope = rope_frequencies(head.rope, head.head_dim, "tiny")
        own = read_weights(head), read_vocabulary(head)
        network = EagleNetwork(head, *own, target, model.lm_head.weight, (4096, 4096), rope, layers)
        return cls(network, SlowHead(variant, pair.drafts[variant], model), 48 * (len(layers) or 1))

    def slow_log_probs(self, visible, path=()):
        """[V] log probs after the visible slots (slot i: token i + 1 and features i) and a path behind them."""
        positions = torch.arange(len(visible) + len(path))
        text = torch.cat([self.token_ids[: visible[-1] + 2], torch.tensor(path, dtype=torch.int64)])
        slots = torch.tensor([*visible, *range(visible[-1] + 1, len(text) - 1)])
        hidden = self.twin.features(self.features[visible])
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

    def assert_trees_are_the_twins(self, chosen, ends, chunk=16):
        """Read a prompt, show some of its positions, and draft a tree after each of several ends of the text."""
        length = ends[0]
        self.prefill(0, length, chunk)
        shown = [position for position in chosen if position < length]
        self.drafter.select(0, torch.tensor(shown))
        for first, last in pairwise(ends):
            self.absorb([0], [first], [last])
            read = range(length - 1, last - 1)
            self.assert_tree_is_the_twins(0, [*(slot for slot in shown if slot < length - 1), *read])

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


WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": 7}
CHOSEN = [*range(8), *range(24, 40)]
"""Positions that a draft sees of a prompt."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and a head in every format and variant."""
    folder = tmp_path_factory.mktemp("published")
    model = tiny_model(FAMILIES["llama"], 0)
    drafts = {name: write(folder / name, model) for name, write in WRITERS.items()}
    drafts["eagle3-windowed"] = WRITERS["eagle3"](folder / "eagle3-windowed", model)
    edit_json(folder / "eagle3-windowed" / "config.json", **WINDOWED)
    return Pair(write_model(model, folder / "target"), drafts)


@pytest.mark.parametrize(
    "variant, length, chunk", covering([*WRITERS, "eagle3-windowed"], [40, 2, 1], [16, 1, 512], strength=2)
)
@torch.inference_mode()
def test_trees_of_a_head_are_its_twins(variant, length, chunk, pair):
    """Order of the concatenation, place of each norm, residual, what is fed back, ids: any slip changes a weight.

    Keys are kept before RoPE and turned to their slots, by each head's own frequencies.
    """
    Case.of_head(pair, variant).assert_trees_are_the_twins(CHOSEN, [length, length + 1, length + 5, length + 6], chunk)


@pytest.mark.parametrize("variant", ["eagle1", "eagle3"])
@torch.inference_mode()
def test_a_batch_of_unequal_rows_is_each_row_alone(pair, variant):
    """Rows absorb one, three and four tokens at once; padding must not reach a neighbour or the row itself."""
    case = Case.of_head(pair, variant)
    lengths = [5, 60, 31]
    ends = [6, 64, 34]
    for row, length in enumerate(lengths):
        case.prefill(row, length, 16)
        case.drafter.select(row, torch.arange(length))
    case.absorb([0, 1, 2], lengths, ends)
    together = [*case.drafter.propose([0, 1, 2])]
    for row, end in enumerate(ends):
        case.assert_tree_is_the_twins(row, list(range(end - 1)))
        [alone] = case.drafter.propose([row])
        assert torch.equal(together[row].token_ids, alone.token_ids)
