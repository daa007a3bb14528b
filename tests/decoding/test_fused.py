"""Layers in fewer operators: the stock model's logits, for each family, whatever runs through them."""

from __future__ import annotations

import copy

import pytest
import torch

from specextend.attention.backends import attend_reference
from specextend.attention.hf import IMPLEMENTATION
from specextend.attention.layer_reference import REFERENCE
from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import CacheHook, KVCache
from specextend.decoding.layers import FusedLayer, fuse
from specextend.decoding.model import CachedModel
from specextend.models import load_causal_lm
from tests.tiny_models import FAMILIES, write_pair


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """A model as it is, fused, and fused with the twins of the kernels for a GPU."""
    pair = write_pair(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])
    stock = load_causal_lm(str(pair.target), None, "float32", "cpu", IMPLEMENTATION)
    fused, with_twins = copy.deepcopy(stock), copy.deepcopy(stock)
    assert fuse(fused)
    assert fuse(with_twins, REFERENCE)
    return stock, fused, with_twins


def run(model, token_ids, plan: AttentionPlan, positions):
    """Logits [B, T, V], and the cache behind them."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = KVCache(
        config.num_hidden_layers, 512, config.num_key_value_heads, head_dim, torch.float32, torch.device("cpu")
    )
    cache.stored.zero_()
    output = model.model(
        input_ids=token_ids,
        position_ids=positions,
        past_key_values=CacheHook(cache, plan),
        plan=plan,
        attend=attend_reference,
        stored=cache.stored,
    )
    return model.lm_head(output.last_hidden_state), cache.stored


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 7)])
def test_fused_layers_give_the_stock_models_logits(models, shape):
    """Joined projections, one operator for a norm, RoPE in three: the same function in fp32, cache included."""
    batch, num_new = shape
    generator = torch.Generator().manual_seed(num_new)
    token_ids = torch.randint(0, 100, shape, generator=generator)
    positions = torch.arange(num_new).expand(shape) + 3
    results = [
        run(model, token_ids, AttentionPlan([0, 128, 256][:batch], [num_new] * batch, num_new), positions)
        for model in models
    ]
    for logits, cache in results[1:]:
        torch.testing.assert_close(logits, results[0][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cache, results[0][1], atol=1e-4, rtol=1e-4)


def test_a_model_of_another_activation_stays_as_it_is(tmp_path):
    """It is served by the stock layers."""
    pair = write_pair(tmp_path, FAMILIES["llama"])
    model = load_causal_lm(str(pair.target), None, "float32", "cpu", IMPLEMENTATION)
    model.config.hidden_act = "gelu"
    layers = [*model.model.layers]
    CachedModel(model, attend_reference, 256)
    assert [*model.model.layers] == layers
    model.config.hidden_act = "silu"
    CachedModel(model, attend_reference, 256)
    assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
