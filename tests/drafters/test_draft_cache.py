"""The draft's two caches: keys filed at position 0, shown at contiguous slots, whatever the RoPE type."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specextend.decoding.cache import KVCache
from specextend.drafters.draft_cache import DraftCache

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
}


def rotary(name: str) -> LlamaRotaryEmbedding:
    """The rotation as a stock model does it."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=32_768,
        rope_parameters=dict(ROPES[name]),
    )
    return LlamaRotaryEmbedding(config)


def turned_by_the_model(embedding: LlamaRotaryEmbedding, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys [L, n, K, D] as a stock model hands them over: after RoPE, yarn's attention scaling included."""
    cos, sin = embedding(keys, positions.unsqueeze(0))
    heads_first = keys.transpose(1, 2)
    return apply_rotary_pos_emb(heads_first, heads_first, cos, sin)[1].transpose(1, 2)


def working_rows(cache: DraftCache, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = slice(cache.start(row), cache.start(row) + cache.visible(row))
    return cache.working.keys[:, :, rows].transpose(1, 2), cache.working.values[:, :, rows].transpose(1, 2)


def put_into_working(cache: DraftCache, row: int, offset: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """What a forward does: write new rows behind those that are there."""
    rows = slice(cache.start(row) + offset, cache.start(row) + offset + keys.shape[1])
    cache.working.keys[:, :, rows], cache.working.values[:, :, rows] = keys.transpose(1, 2), values.transpose(1, 2)


@pytest.mark.parametrize("name", ROPES)
def test_keys_come_back_as_a_fresh_run_at_their_slots_would_make_them(name):
    """Prefilled at positions 16,000 and up, shown at slots 0 and up: in range for a draft trained on 2K.

    yarn scales keys once; a second scaling in the gather would sharpen every score by its square.
    """
    embedding = rotary(name)
    cache = DraftCache(KVCache(2, 1024, 2, 32, torch.float32, torch.device("cpu")), 2048, embedding.inv_freq)
    bare = torch.randn(2, 100, 2, 32, generator=torch.Generator().manual_seed(100))
    values = bare + 1
    positions = torch.arange(16_000, 16_100)
    assert cache.admit(0, 200, 300)
    put_into_working(cache, 0, 0, turned_by_the_model(embedding, bare, positions), values)
    cache.store_working(0, 0, 100, 16_000)
    chosen = torch.tensor([0, 1, 2, 40, 41, 42, 97, 98, 99])
    cache.select(0, chosen)
    keys, shown = working_rows(cache, 0)
    torch.testing.assert_close(shown, values[:, chosen])
    fresh = turned_by_the_model(embedding, bare[:, chosen], torch.arange(9))
    torch.testing.assert_close(keys, fresh, atol=5e-5, rtol=0)
