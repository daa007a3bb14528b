"""What an EAGLE-3 head begins with."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from specextend.training.eagle3 import fused_layers
from specextend.training.eagle3_start import new_weights, read_text
from specextend.training.recording import Span
from tests.training.test_parity import HIDDEN, fused_shape

TOKENS = 120


def prompt(embedding: torch.Tensor, seed: int) -> Span:
    """Random text; the low layer holds each token and a little of the one before, the other layers noise."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(TOKENS, (1500,), generator=generator)
    embedded = embedding[token_ids]
    noise = [torch.randn(1500, HIDDEN, generator=generator) for _ in range(3)]
    low = embedded + 0.3 * embedded.roll(1, 0) + 0.1 * noise[0]
    return Span(token_ids, torch.cat([low, *noise[1:]], 1), noise[2])


def test_a_head_that_copies_finds_a_token_before_it_has_learned_anything(tmp_path):
    """A search over thousands of places hardly ever begins by itself: the first match must be there to learn from."""
    embedding = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    shape, rows = fused_shape(tmp_path, head_dim=32), torch.arange(40)
    text = read_text(prompt(embedding, seed) for seed in range(3))
    weights = new_weights(shape, text, embedding, embedding[rows], torch.ones(HIDDEN), 0)
    expected = {name: size for name, size in shape.required().items() if name != "d2t"}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected
    read = prompt(embedding, 9)
    fused = rms_norm(read.hidden @ weights["fc.weight"].T, (HIDDEN,))
    size = shape.head_dim
    copying = weights["layer.self_attn.k_proj.weight"][size:, HIDDEN:]  # the second of two key heads
    asking = weights["layer.self_attn.q_proj.weight"][2 * size : 3 * size, :HIDDEN]  # the first of its query heads
    scores = rms_norm(embedding, (HIDDEN,)) @ asking.T @ (fused @ copying.T).T
    found = read.token_ids[scores.argmax(1)]
    assert (found == torch.arange(TOKENS)).float().mean() > 0.9


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(3, (0, 1, 2)), (6, (0, 3, 5)), (7, (1, 2, 3)), (30, (1, 14, 26)), (32, (1, 15, 28))]
)
def test_a_low_a_middle_and_a_high_layer_are_joined(num_layers, layers):
    """Those that every reader takes where a file names none, if the target has them."""
    assert fused_layers(num_layers) == layers


def test_a_target_of_two_layers_has_not_enough():
    """In one line, before anything is recorded."""
    with pytest.raises(ValueError, match="joins the outputs of three layers; the target has 2"):
        fused_layers(2)
