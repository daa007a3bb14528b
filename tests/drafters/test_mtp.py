"""The layer for the next token but one in a checkpoint, in the layout of each family, against transformers' own code.

`MtpModel` of transformers runs the same weights over whole texts, with plain attention at the tokens' own positions.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_layers import MtpModel

from specextend.attention.plain import attend_reference
from specextend.decoding.model import CachedModel
from specextend.drafters.lm_networks import MtpNetwork
from specextend.models.causal_lm import load_causal_lm, load_mtp
from specextend.models.loading import memory_bytes
from specextend.models.model_files import ModelError
from specextend.models.pairing import check_pair
from specextend.proof.family import small_model
from tests import reference_outputs
from tests.decoding.test_recurrent import DELTA
from tests.drafters.test_eagle_network import CHOSEN, Case
from tests.faults.scarce import Memory, before_forwards
from tests.models.conftest import edit_json, edit_tensors
from tests.reference_outputs import tokens_of
from tests.refused import refused
from tests.tiny_models import Pair, load_reference, random_prompt, request, tiny_config, tiny_engine, write_family

QWEN = ("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
OTHER = ("model.layers.{n}.", *(f"model.layers.{{n}}.{name}" for name in ("eh_proj", "enorm", "hnorm")))
AFTER_THE_LAST = (*OTHER, "model.layers.{n}.shared_head.norm")
LAYOUTS = {
    "qwen3_5_text": (QWEN, DELTA),
    "qwen3_next": (QWEN, DELTA),
    "glm4_moe": (AFTER_THE_LAST, {"num_hidden_layers": 3, "head_dim": 16}),
    "deepseek_v3": (AFTER_THE_LAST, {"num_hidden_layers": 3}),
    "glm4_moe_lite": (AFTER_THE_LAST, {"num_hidden_layers": 3}),
}
"""Families, the names of their tensors, and what makes a small target: partial RoPE, experts, keys from a latent."""
SURE = 8
"""Factor on logits, so that trees are deep, and on embeddings."""
SMALL = 0.2
"""Factor on what a layer adds."""
LENGTHS = (600, 37, 129)
NEW_TOKENS = 30


def one_layer(config):
    """The values of the config that the decoder layer has."""
    values = config.to_dict() | {"num_hidden_layers": 1}
    if values.get("layer_types"):
        values["layer_types"] = ["full_attention"]
    if values.get("mlp_layer_types"):
        values["mlp_layer_types"] = ["sparse"]
    return values | ({"first_k_dense_replace": 0} if "first_k_dense_replace" in values else {})


def write_target(folder, family):
    """A random target with a layer that often guesses right: both look at the last token above all."""
    names, values = LAYOUTS[family]
    pair = write_family(folder, family, **values)
    stock = load_reference(pair)
    alone = small_model(one_layer(stock.config))
    for name, weight in (*stock.named_parameters(), *alone.named_parameters()):
        if any(added in name for added in ("o_proj", "down_proj", "out_proj")):
            weight.data *= SMALL
    stock.lm_head.weight.data *= SURE
    stock.get_input_embeddings().weight.data *= SURE
    stock.save_pretrained(pair.target)
    alone.save_pretrained(folder / "alone")
    hidden = stock.config.hidden_size
    layer, join, *norms, norm = (name.format(n=stock.config.num_hidden_layers) for name in names)
    own = load_file(folder / "alone" / "model.safetensors")
    tensors = {
        name.replace("model.layers.0.", layer): tensor for name, tensor in own.items() if "model.layers.0." in name
    }
    tensors[f"{norm}.weight"] = own["model.norm.weight"]
    for name in norms:
        tensors[f"{name}.weight"] = own["model.norm.weight"] + torch.randn(hidden) * 0.05
    tensors[f"{join}.weight"] = torch.cat([torch.eye(hidden), torch.randn(hidden, hidden) * 0.1 / hidden**0.5], 1)
    if "{n}" in names[0]:
        tensors[f"{layer}embed_tokens.weight"] = own["model.embed_tokens.weight"]
        tensors[f"{layer}shared_head.head.weight"] = own["lm_head.weight"].clone()
    edit_tensors(pair.target, tensors)
    return pair


class Twin:
    """transformers' own module, with the weights by its names."""

    def __init__(self, pair):
        stock = load_reference(pair)
        config = stock.config
        config.num_mtp_layers = 1
        config.mtp_layer_types, config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
        self._head = stock.lm_head
        self._module = MtpModel(stock, 1).eval()
        layer, joining = load_mtp(pair.target, "float32", "cpu")
        own = {"join": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm"}
        state = {f"{own[name]}.weight": weight for name, weight in joining.items()}
        state |= {f"mtp_block.{name}": weight for name, weight in layer.model.layers[0].state_dict().items()}
        state["post_norm.weight"] = layer.model.norm.weight
        self._module.layers[0].load_state_dict(state)

    def features(self, taken):
        return taken

    def __call__(self, token_ids, hidden, positions):
        """Outputs [n, C] of texts; see `SlowHead`."""
        return self._module.forward_layer(0, hidden[None], positions[None], None, input_ids=token_ids[None])[0]

    def log_probs(self, output):
        return self._head(output).log_softmax(-1)


def case_of(pair):
    """The drafter of a checkpoint, and transformers' own module, on one random text."""
    model = load_causal_lm(pair.target, "float32", "cpu")
    target = CachedModel(model, attend_reference, 256)
    network = MtpNetwork(*load_mtp(pair.target, "float32", "cpu"), target, (4096, 4096))
    return Case(network, Twin(pair), model.config.hidden_size)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    made = {}

    def find(family):
        if family not in made:
            made[family] = write_target(tmp_path_factory.mktemp(family), family)
        return made[family]

    return find


@pytest.mark.parametrize("family", LAYOUTS)
@torch.inference_mode()
def test_trees_are_those_of_transformers_own_module(family, targets):
    """Order of the join, norms, the state that goes on, RoPE of each family, and slots that a choice moves."""
    case_of(targets(family)).assert_trees_are_the_twins(CHOSEN, [40, 41, 45, 46])


@pytest.mark.parametrize("family", [*[*LAYOUTS][:-1], pytest.param([*LAYOUTS][-1], marks=pytest.mark.slow)])
def test_output_with_the_layer_in_the_checkpoint_is_the_stock_models(family, targets):
    """Trees or chains, in a batch, with retrieval and n-grams, and after a restart for lack of memory."""
    pair = targets(family)
    stock = load_reference(pair)
    expected = {
        str(length): reference_outputs.generate(stock, random_prompt(length), NEW_TOKENS).token_ids
        for length in LENGTHS
    }
    requests = [request(str(length), random_prompt(length), NEW_TOKENS) for length in LENGTHS]
    engine = tiny_engine(pair, "mtp", decoding__max_batch_size=3)
    completions = list(engine.generate(requests))
    assert tokens_of(completions) == expected
    stats = [completion.stats for completion in completions]
    assert sum(each.num_accepted_tokens for each in stats) > 1
    assert sum(each.num_retrievals for each in stats) > 3
    before_forwards(engine, Memory(step_rows=5).allow)
    again = list(engine.generate(requests))
    assert tokens_of(again) == expected
    assert max(each.stats.num_memory_retries for each in again) >= 1


def test_memory_is_forecast_for_the_layer(targets):
    """By the config alone."""
    pair = targets("glm4_moe")
    config = tiny_config(pair, "mtp")
    facts = check_pair(config.target, config.draft)
    layer, joining = load_mtp(pair.target, "float32", "cpu")
    weights = [*layer.parameters(), *joining.values()]
    assert memory_bytes(config, facts)["draft_weights"] == pytest.approx(4 * sum(map(torch.numel, weights)), rel=0.01)


@pytest.mark.parametrize(
    "family, name, tensor, message",
    [
        (
            "glm4_moe",
            "model.layers.2.eh_proj.weight",
            None,
            "has no layer for draft.kind mtp (mtp.fc.weight or eh",
        ),
        ("glm4_moe", "model.layers.2.hnorm.weight", None, "lacks hidden_norm.weight of its MTP layer"),
        ("glm4_moe", "model.layers.2.self_attn.k_proj.weight", None, "has missing tensors: model.layers.0.self_attn.k"),
        ("qwen3_5_text", "mtp.layers.1.mlp.up_proj.weight", torch.ones(2), "has the tensor mtp.layers.1.mlp.up_proj"),
    ],
)
def test_a_checkpoint_without_the_layer_or_with_another_is_refused(family, name, tensor, message, targets, tmp_path):
    """In one line, before a document is read."""
    pair = Pair(str(shutil.copytree(targets(family).target, tmp_path / "target")), {})
    edit_tensors(pair.target, {name: tensor})
    assert message in refused(tiny_engine, pair, "mtp", kind=ModelError)


def test_a_checkpoint_that_also_sees_images_is_read_for_its_text(targets, tmp_path):
    """As Qwen3.5's are published: another class, a config around that of the text, other names of its tensors."""
    pair = targets("qwen3_5_text")
    seeing = Pair(str(shutil.copytree(pair.target, tmp_path / "target")), {})
    edit_tensors(seeing.target, {}, lambda name: name.replace("model.", "model.language_model.", 1))
    edit_tensors(seeing.target, {"model.visual.patch_embed.proj.bias": torch.ones(2)})
    text = json.loads(Path(pair.target, "config.json").read_text())
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    Path(seeing.target, "config.json").write_text(json.dumps(config))
    edit_json(Path(seeing.target, "tokenizer_config.json"), unk_token="t0", pad_token="t0")  # this class adds its own
    requests = [request("a", random_prompt(60), NEW_TOKENS)]
    expected, found = (tokens_of(tiny_engine(each, "mtp").generate(requests)) for each in (pair, seeing))
    assert found == expected
