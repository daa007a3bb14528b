"""An EAGLE head as a trainable module, with the tensors of `drafters/eagle_config.py`.

Shapes: `n` slots, `C` hidden size, `D` head size, `V` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from specextend.decoding.draft_cache import rotate
from specextend.drafters.eagle_config import VOCABULARY, EagleConfig
from specextend.training.chain import Tensors
from specextend.training.slots import Places


class EagleHead(nn.Module):
    """The head in fp32, for training; embedding and LM head are the target's and stay as they are."""

    def __init__(self, config: EagleConfig, weights: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor) -> None:
        """`weights`: all tensors of the config. `embedding` [tokens, C], `lm_head` [tokens, C]."""
        super().__init__()
        self.config = config
        self.embedding: Tensor
        self.target_rows: Tensor
        self.vocabulary: Tensor
        self._inv_freq: Tensor
        trained = {name: weight for name, weight in weights.items() if name != VOCABULARY}
        self.tensors = Tensors(trained, config.head_dim, config.layer_norm_eps, config.head_norm_eps)
        vocabulary = weights.get(VOCABULARY, torch.arange(len(lm_head))).to(lm_head.device)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("target_rows", lm_head[vocabulary], persistent=False)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("_inv_freq", config.rope_theta**-exponents, persistent=False)

    def keys_values(self, places: Places, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n, K, D] each of hidden [n, C], the copy heads' last."""
        normed = self.tensors.norm("layer.input_layernorm", self._inputs(places, hidden))
        keys = rotate(self.tensors.heads("layer.self_attn.k_proj", normed), places.positions, self._inv_freq)
        values = self.tensors.heads("layer.self_attn.v_proj", normed)
        if self.config.copy_heads:
            copied = self.tensors.heads("copy.k_proj", self._embed(places.history).flatten(-2))
            keys = torch.cat([keys, copied], -2)
            values = torch.cat([values, self.tensors.heads("copy.v_proj", self._embed(places.token_ids))], -2)
        return keys, values

    def layer(self, places: Places, hidden: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """[n, C] of slots that see keys and values [m, K, D] as `visible` [n, m] says."""
        residual = self._inputs(places, hidden)
        normed = self.tensors.norm("layer.input_layernorm", residual)
        query = rotate(self.tensors.heads("layer.self_attn.q_proj", normed), places.positions, self._inv_freq)
        if self.config.copy_heads:
            latest = torch.cat([places.token_ids[:, None], places.history[:, :-1]], 1)
            query = torch.cat([query, self.tensors.heads("copy.q_proj", self._embed(latest).flatten(-2))], -2)
        return self.tensors.norm("norm", self.tensors.finish(residual, query, keys, values, visible))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] of outputs [n, C]."""
        return linear(hidden, self.target_rows.to(hidden.dtype))

    def _inputs(self, places: Places, hidden: Tensor) -> Tensor:
        return self.tensors.linear(
            "fc", torch.cat([self._embed(places.token_ids), self.tensors.norm("hn", hidden)], -1)
        )

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.tensors.norm("en", self.embedding[token_ids])


def add_copy_heads(
    weights: Mapping[str, Tensor], config: EagleConfig, embedding: Tensor, seed: int
) -> dict[str, Tensor]:
    """The tensors of a head with copy heads that find a token where it stood before, yet add nothing to the output.

    Queries and keys are one random projection of the last tokens each, so they match where three, two or one of them
    are the same; the output projection starts at zero, so training begins at the head as it was.
    """
    assert config.copy_heads is not None
    generator = torch.Generator().manual_seed(seed)
    size, group = config.copy_heads * config.head_dim, config.num_heads // config.num_kv_heads
    norm = (rms_norm(embedding.float(), (embedding.shape[1],)) * weights["en.weight"].float()).square().sum(1).mean()
    shape = (size, 3 * config.hidden_size)
    keys = torch.randn(shape, generator=generator) / (config.head_dim * norm) ** 0.5
    # One equal token gives a score of about 8 after the scale of D**-0.5; equal heads would learn the same.
    sharper = 8 * torch.linspace(0.5, 1.5, group + 2)[1:-1, None, None]
    queries = sharper * config.head_dim**0.5 * keys.view(config.copy_heads, 1, config.head_dim, -1)
    return {
        **weights,
        "copy.k_proj.weight": keys,
        "copy.q_proj.weight": queries.flatten(0, 2),
        "copy.v_proj.weight": torch.randn(size, config.hidden_size, generator=generator) / config.hidden_size**0.5,
        "layer.self_attn.o_proj.weight": pad(weights["layer.self_attn.o_proj.weight"].float(), (0, group * size)),
    }


def new_weights(config: EagleConfig, final_norm: Tensor, seed: int) -> dict[str, Tensor]:
    """The tensors of an untrained head without copy heads, which at first hands the target's hidden state on.

    `final_norm` [C]: weight of the target's last norm, whose place the head's own takes.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        name: info.shape for name, info in replace(config, draft_vocab_size=None, copy_heads=None).tensors().items()
    }
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    weights["fc.weight"][:, config.hidden_size :] += torch.eye(config.hidden_size)
    return {**weights, "norm.weight": final_norm.float().cpu()}
