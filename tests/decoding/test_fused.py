"""Layers in fewer operators: the stock model's logits, for each family, whatever runs through them."""

from __future__ import annotations

import copy

import pytest
import torch

from specextend.attention.plan import AttentionPlan
from specextend.attention.reference import attend_reference
from specextend.decoding.model import CachedModel
from specextend.models import load_causal_lm
from tests.tiny_models import FAMILIES, write_pair


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """A model as transformers runs it, and on layers of ours."""
    pair = write_pair(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])
    stock = load_causal_lm(str(pair.target), None, "float32", "cpu")
    return stock, CachedModel(copy.deepcopy(stock), attend_reference, 768)


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 7)])
def test_fused_layers_give_the_stock_models_logits(models, shape):
    """Joined projections, one operator for a norm, RoPE in three: the same function in fp32."""
    stock, fused = models
    batch, num_new = shape
    token_ids = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(num_new))
    positions = torch.arange(num_new).expand(shape) + 3
    expected = stock(token_ids, position_ids=positions, use_cache=False).logits
    plan = AttentionPlan([0, 128, 256][:batch], [num_new] * batch, num_new)
    logits = fused.logits(fused.forward(token_ids, positions, plan))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
