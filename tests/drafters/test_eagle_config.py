"""The format of an EAGLE head: what a wrong folder is told, before a tensor is loaded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from specextend.drafters.eagle_config import WEIGHTS_FILE, EagleConfig, load_eagle_config

TINY = EagleConfig(
    target="tiny",
    vocab_size=64,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rope_theta=10000.0,
    layer_norm_eps=1e-5,
    head_norm_eps=1e-6,
    dtype="bfloat16",
)


@pytest.fixture
def folder(tmp_path):
    """A head of the right shape."""
    TINY.save(tmp_path)
    tensors = {name: torch.zeros(info.shape, dtype=torch.bfloat16) for name, info in TINY.tensors().items()}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    return tmp_path


def refusal(folder) -> str:
    """What a user reads; it must be one line."""
    with pytest.raises(ValueError) as refused:
        load_eagle_config(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": torch.zeros(32, 64)}, "fc.weight is F32 [32, 64], config.json says BF16 [32, 64]"),
        ({"fc.bias": torch.zeros(32)}, "has the unknown tensor fc.bias"),
        ({"norm.weight": None}, "lacks norm.weight"),
    ],
    ids=["dtype", "unknown", "missing"],
)
def test_weights_that_the_config_does_not_describe_are_refused(folder, change, message):
    """A tensor too many means a network that we do not compute."""
    file = folder / WEIGHTS_FILE
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    assert message in refusal(folder)


@pytest.mark.parametrize("token_ids", [[3, 2, 1], [1, 2, 64]], ids=["order", "too high"])
def test_a_reduced_vocabulary_of_other_tokens_is_refused(folder, token_ids):
    """They would be found out at the first proposal, or never."""
    TINY.model_copy(update={"draft_vocab_size": 3}).save(folder)
    tensors = load_file(folder / WEIGHTS_FILE) | {"draft_token_ids": torch.tensor(token_ids)}
    save_file(tensors, folder / WEIGHTS_FILE)
    assert "draft_token_ids must be ascending ids from 0 to 63" in refusal(folder)
