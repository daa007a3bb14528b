"""What is trained must be what runs: the trainable head against the network that drafts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specextend.attention.plain import attend_reference
from specextend.attention.plan import AttentionPlan
from specextend.decoding.model import CachedModel
from specextend.drafters.eagle_network import EagleNetwork
from specextend.drafters.formats import WEIGHTS_FILE, EagleConfig, read_head, read_vocabulary, read_weights
from specextend.models.causal_lm import load_causal_lm, rope_frequencies
from specextend.training.eagle_head import EagleHead, Slots, chain, lay_out
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model, write_eagle, write_model
from tests.training.conftest import made_up_recording

HIDDEN = 48


def load_tiny(folder):
    model = tiny_model(FAMILIES["llama"], 0)
    return CachedModel(load_causal_lm(write_model(model, folder), "float32", "cpu"), attend_reference, 64)


def drafted(network, slots):
    """[2, C]: what the network gives for the last slot but one of the answer, and behind it from its own output."""
    prompt = (~slots.is_answer).nonzero()[:, 0]
    own = slots.is_answer.nonzero()[:, 0]
    num_read = len(prompt) + 1
    assert network.cache.admit(0, 64, 64)
    text = torch.cat([slots.history[:1, 0].expand(4), slots.token_ids[prompt]])
    network.prefill(0, text, slots.hidden[torch.cat([prompt, own[:1]])])
    network.cache.select(0, torch.arange(num_read - 1))

    def run(which, hidden):
        places, first, count = Slots(*(x[which] for x in slots)), network.cache.of[0].visible, len(which)
        plan = AttentionPlan([network.cache.of[0].working.start], [first + count], count)
        positions = torch.arange(first, first + count)[None]
        output = network.forward(places.token_ids[None], hidden[None], positions, plan, places.history[None])
        rows, full_rows = plan.new_rows(positions.device).flatten(), network.cache.of[0].full_end + torch.arange(count)
        network.cache.write_back(rows, positions[0], full_rows)
        network.cache.advance(0, [0] * count)
        return output[0, -1:]

    first = run(own[:-1], slots.hidden[own[:-1]])
    return torch.cat([first, run(own[-1:], first)])


def trained(head, slots):
    """The same of the trainable head."""
    asked = slots.is_answer.nonzero()[-2]
    with torch.inference_mode():
        return torch.cat([hidden for hidden, _ in chain(head, slots, asked, 2)])


@pytest.mark.parametrize("copy_heads", [None, 2])
def test_an_eagle_head_gives_what_its_network_gives(tmp_path, copy_heads):
    """A head that is trained on another formula than it runs by is worth nothing, and nothing else would show it."""
    target = load_tiny(tmp_path / "target")
    folder = write_eagle(tmp_path / "head", target.model, VOCABULARY // 2, copy_heads)
    config = EagleConfig.model_validate_json(Path(folder, "config.json").read_text())
    weights = load_file(f"{folder}/{WEIGHTS_FILE}")
    embedding = target.model.get_input_embeddings().weight
    lm_head = target.model.lm_head.weight
    head = EagleHead(config, weights, embedding, lm_head)
    slots = lay_out(made_up_recording(VOCABULARY, HIDDEN))
    own = read_head(folder)
    rope = rope_frequencies(own.rope, own.head_dim, "tiny")
    network = EagleNetwork(own, read_weights(own), read_vocabulary(own), target, lm_head, (64, 64), rope)
    expected = drafted(network, slots)
    found = trained(head, slots)
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(head.logits(found), network.logits(expected), atol=1e-3)
