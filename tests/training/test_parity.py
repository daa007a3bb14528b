"""What is trained must be what runs: the trainable heads against the networks that draft."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specextend.attention.backends import attend_reference
from specextend.attention.hf import IMPLEMENTATION
from specextend.attention.plan import AttentionPlan
from specextend.decoding.model import CachedModel
from specextend.drafters.causal import DraftNetwork
from specextend.drafters.eagle_config import WEIGHTS_FILE, load_eagle_config
from specextend.drafters.eagle_network import EagleNetwork, PublishedNetwork
from specextend.drafters.formats import PublishedHead, read_head, read_vocabulary, read_weights
from specextend.models import load_causal_lm, rope_frequencies
from specextend.training.eagle3_head import FusedHead, fused_layers, new_fused_weights, save_fused
from specextend.training.eagle_head import EagleHead
from specextend.training.head_training import Head, chain
from specextend.training.slots import Slots, lay_out
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model, write_eagle, write_model
from tests.training.conftest import made_up_recording

HIDDEN = 48


def load_tiny(folder) -> CachedModel:
    model = tiny_model(FAMILIES["llama"], 0)
    return CachedModel(
        load_causal_lm(write_model(model, folder), None, "float32", "cpu", IMPLEMENTATION), attend_reference, 64
    )


def drafted(network: DraftNetwork, slots: Slots, group: int) -> Tensor:
    """[2, C]: what the network gives for the last slot but one of an answer, and behind it from its own output."""
    prompt, own = (slots.groups == 0).nonzero()[:, 0], (slots.groups == group).nonzero()[:, 0]
    num_read = len(prompt) + 1
    assert network.cache.admit(0, 64, 64)
    token_ids = torch.cat([slots.places.history[:1, 0], slots.places.token_ids[prompt]])
    network.prefill(0, token_ids, slots.hidden[torch.cat([prompt, own[:1]])])
    network.cache.select(0, torch.arange(num_read - 1))

    def run(which: Tensor, hidden: Tensor) -> Tensor:
        places, first, count = slots.places.at(which), network.cache.visible(0), len(which)
        plan = AttentionPlan([network.cache.start(0)], [first + count], count)
        positions = torch.arange(first, first + count)[None]
        output = network.forward(places.token_ids[None], hidden[None], positions, plan, places.history[None])
        rows, full_rows = plan.new_rows(positions.device).flatten(), network.cache.full_end(0) + torch.arange(count)
        network.cache.write_back(rows, positions[0], full_rows)
        network.cache.advance(0, count)
        return output[0, -1:]

    first = run(own[:-1], slots.hidden[own[:-1]])
    return torch.cat([first, run(own[-1:], first)])


def trained(head: Head, slots: Slots, group: int) -> Tensor:
    """The same of the trainable head."""
    asked = (slots.groups == group).nonzero()[-2]
    with torch.inference_mode():
        return torch.cat([hidden for hidden, _ in chain(head, slots, asked, 2)])


@pytest.mark.parametrize("copy_heads", [None, 2])
def test_an_eagle_head_gives_what_its_network_gives(tmp_path, copy_heads):
    """A head that is trained on another formula than it runs by is worth nothing, and nothing else would show it."""
    target = load_tiny(tmp_path / "target")
    folder = write_eagle(tmp_path / "head", target.model, VOCABULARY // 2, copy_heads)
    config, weights = load_eagle_config(folder), load_file(f"{folder}/{WEIGHTS_FILE}")
    embedding, lm_head = target.model.get_input_embeddings().weight, target.model.lm_head.weight
    head = EagleHead(config, weights, embedding, lm_head)
    slots = lay_out(made_up_recording(VOCABULARY, HIDDEN, HIDDEN))
    for group in (1, 2):
        network = EagleNetwork(config, weights, target, lm_head, 64)
        expected, found = drafted(network, slots, group), trained(head, slots, group)
        assert torch.allclose(found, expected, atol=1e-4)
        assert torch.allclose(head.logits(found), network.logits(expected), atol=1e-3)


def fused_shape(folder) -> PublishedHead:
    return PublishedHead(
        folder=folder,
        format="EAGLE-3",
        fused=True,
        vocab_size=VOCABULARY,
        target_hidden_size=HIDDEN,
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        intermediate_size=64,
        norm_eps=1e-5,
        rope={"rope_theta": 1e6},
        draft_vocab_size=VOCABULARY // 3,
        layers=(0, 1, 2),
        norm_before_residual=False,
        norm_before_fc=False,
        layer_norms=False,
        fusion_bias=False,
    )


def test_an_eagle3_head_gives_what_the_reader_of_its_file_gives(tmp_path):
    """The file is written for other engines too: what is read back by the rules of the format must be the same head."""
    torch.manual_seed(1)
    target, shape = load_tiny(tmp_path / "target"), fused_shape(tmp_path)
    random = {name: torch.randn(size) * 0.2 for name, size in shape.required().items() if name != "d2t"}
    weights = {name: weight.bfloat16().float() for name, weight in random.items()}
    vocabulary = torch.randperm(VOCABULARY)[: VOCABULARY // 3].sort().values
    lm_head = target.model.lm_head.weight
    head = FusedHead(shape, weights, vocabulary, target.model.get_input_embeddings().weight, lm_head)
    save_fused(head, "tiny", 2048, tmp_path)
    read = read_head(tmp_path)
    assert read.hidden_layers(3) == shape.layers
    slots = lay_out(made_up_recording(VOCABULARY, HIDDEN, 3 * HIDDEN))
    for group in (1, 2):
        rope = rope_frequencies(read.rope, read.head_dim, "head")
        published = read_weights(read), read_vocabulary(read)
        network = PublishedNetwork(read, *published, target, lm_head, 64, rope, read.hidden_layers(3))
        expected, found = drafted(network, slots, group), trained(head, slots, group)
        assert torch.allclose(found, expected, atol=1e-4)
        assert torch.allclose(head.logits(found), network.logits(expected), atol=1e-3)
        assert torch.equal(network.vocabulary, vocabulary)


def test_an_untrained_eagle3_head_passes_the_highest_layer_on(tmp_path):
    """Training begins at a useful guess: the layer nearest to the output, read by the target's own LM head."""
    shape = fused_shape(tmp_path)
    lm_rows, final_norm = torch.randn(shape.draft_vocab_size, HIDDEN), torch.rand(HIDDEN)
    weights = new_fused_weights(shape, lm_rows, final_norm, seed=0)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        name: size for name, size in shape.required().items() if name != "d2t"
    }
    features = torch.randn(20, 3 * HIDDEN)
    passed_on = features @ weights["fc.weight"].T
    assert torch.cosine_similarity(passed_on, features[:, 2 * HIDDEN :]).min() > 0.9
    assert torch.equal(weights["lm_head.weight"], lm_rows)
    assert torch.equal(weights["norm.weight"], final_norm)


@pytest.mark.parametrize(("num_layers", "layers"), [(3, (0, 1, 2)), (6, (0, 3, 5)), (7, (1, 2, 3)), (30, (1, 14, 26))])
def test_a_low_a_middle_and_a_high_layer_are_joined(num_layers, layers):
    """Those that every reader takes where a file names none, if the target has them."""
    assert fused_layers(num_layers) == layers


def test_a_target_of_two_layers_has_not_enough():
    """In one line, before anything is recorded."""
    with pytest.raises(ValueError, match="reads the outputs of three layers; the target has only 2"):
        fused_layers(2)
