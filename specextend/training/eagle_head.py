"""Training of an EAGLE head in our own format, with copy heads; its tensors are those of `drafters/eagle_config.py`.

Shapes: `n` slots, `C` hidden size, `K` key heads, `D` head size, `V` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from specextend.drafters.draft_cache import rotate
from specextend.drafters.eagle_config import VOCABULARY, WEIGHTS_FILE, EagleConfig, load_eagle_config
from specextend.training.head_training import HeadTensors, evaluate_head, fit_head
from specextend.training.slots import SlotInputs
from specextend.training.task import Target, Task


class EagleHead(nn.Module):
    """A trainable head in fp32; embedding and LM head are the target's and stay frozen."""

    def __init__(self, config: EagleConfig, weights: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor) -> None:
        """Take all tensors of the config, and the target's `embedding` and `lm_head` [tokens, C]."""
        super().__init__()
        self.config = config
        self.embedding: Tensor
        self.target_rows: Tensor
        self.vocabulary: Tensor
        self._inv_freq: Tensor
        trained = {name: weight for name, weight in weights.items() if name != VOCABULARY}
        self.tensors = HeadTensors(trained, config.head_dim, config.layer_norm_eps, config.head_norm_eps)
        vocabulary = weights.get(VOCABULARY, torch.arange(len(lm_head))).to(lm_head.device)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("target_rows", lm_head[vocabulary], persistent=False)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("_inv_freq", config.rope_theta**-exponents, persistent=False)

    def keys_values(self, places: SlotInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values [n, K, D] from hidden [n, C]; the copy heads come last."""
        normed = self.tensors.norm("layer.input_layernorm", self._inputs(places, hidden))
        keys = rotate(self.tensors.heads("layer.self_attn.k_proj", normed), places.positions, self._inv_freq)
        values = self.tensors.heads("layer.self_attn.v_proj", normed)
        if self.config.copy_heads:
            copied = self.tensors.heads("copy.k_proj", self._embed(places.history).flatten(-2))
            keys = torch.cat([keys, copied], -2)
            values = torch.cat([values, self.tensors.heads("copy.v_proj", self._embed(places.token_ids))], -2)
        return keys, values

    def layer(self, places: SlotInputs, hidden: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Compute the output [n, C] of slots that see keys and values [m, K, D] where `visible` [n, m] is true."""
        residual = self._inputs(places, hidden)
        normed = self.tensors.norm("layer.input_layernorm", residual)
        query = rotate(self.tensors.heads("layer.self_attn.q_proj", normed), places.positions, self._inv_freq)
        if self.config.copy_heads:
            latest = torch.cat([places.token_ids[:, None], places.history[:, :-1]], 1)
            query = torch.cat([query, self.tensors.heads("copy.q_proj", self._embed(latest).flatten(-2))], -2)
        return self.tensors.norm("norm", self.tensors.finish(residual, query, keys, values, visible))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, V] from outputs [n, C]."""
        return linear(hidden, self.target_rows.to(hidden.dtype))

    def _inputs(self, places: SlotInputs, hidden: Tensor) -> Tensor:
        return self.tensors.linear(
            "fc", torch.cat([self._embed(places.token_ids), self.tensors.norm("hn", hidden)], -1)
        )

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.tensors.norm("en", self.embedding[token_ids])


def add_copy_heads(
    weights: Mapping[str, Tensor], config: EagleConfig, embedding: Tensor, seed: int
) -> dict[str, Tensor]:
    """Add copy heads that find earlier occurrences of the last tokens but do not change the output yet.

    Queries and keys are the same random projection of the last three tokens, so they match where three, two or one of
    them are equal. The output projection starts at zero, so training begins at the head as it was.
    """
    assert config.copy_heads is not None
    generator = torch.Generator().manual_seed(seed)
    size, group = config.copy_heads * config.head_dim, config.num_heads // config.num_kv_heads
    norm = (rms_norm(embedding.float(), (embedding.shape[1],)) * weights["en.weight"].float()).square().sum(1).mean()
    shape = (size, 3 * config.hidden_size)
    keys = torch.randn(shape, generator=generator) / (config.head_dim * norm) ** 0.5
    # One equal token scores about 8 after the scale of D**-0.5. The heads differ, or all would learn the same.
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
    """Initialise a head without copy heads so that it first passes the target's hidden state on.

    `final_norm` [C] is the weight of the target's last norm, from which the head's own norm starts.
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


def train_eagle(task: Task) -> dict[str, Any]:
    """Train a head, write it and return its figures."""
    config, weights = _first_head(task)
    head = EagleHead(config, weights, task.target.embedding, task.target.lm_head).to(task.target.device)
    fit_head(task, head)
    dtype = getattr(torch, config.dtype)
    tensors = {name: weight.to(dtype).cpu().contiguous() for name, weight in head.tensors.values().items()}
    vocabulary = {} if config.draft_vocab_size is None else {VOCABULARY: weights[VOCABULARY]}
    save_file({**tensors, **vocabulary}, task.output / WEIGHTS_FILE)
    config.save(task.output)
    return evaluate_head(task, head)


def _first_head(task: Task) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Return the shape and the tensors that training starts from."""
    options, target = task.options, task.target
    if options.start_from is not None:
        config = load_eagle_config(options.start_from)
        weights = load_file(f"{options.start_from}/{WEIGHTS_FILE}")
    else:
        assert task.vocabulary is not None
        config = _new_config(target, len(task.vocabulary))
        weights = new_weights(config, target.final_norm, options.sample.seed) | {VOCABULARY: task.vocabulary}
    if options.copy_heads and config.copy_heads is None:
        config = replace(config, copy_heads=options.copy_heads)
        weights = add_copy_heads(weights, config, target.embedding.cpu(), options.sample.seed)
    return replace(config, tokens_sha256=target.tokens_sha256), weights


def _new_config(target: Target, draft_vocab_size: int) -> EagleConfig:
    """Describe a head of one layer in the target's own shape."""
    return EagleConfig(
        target=target.name,
        vocab_size=len(target.embedding),
        hidden_size=target.config.hidden_size,
        num_heads=target.config.num_attention_heads,
        num_kv_heads=target.config.num_key_value_heads,
        head_dim=target.head_dim,
        intermediate_size=target.config.intermediate_size,
        rope_theta=float(target.config.rope_parameters["rope_theta"]),
        layer_norm_eps=float(target.config.rms_norm_eps),
        head_norm_eps=1e-6,
        dtype="bfloat16",
        draft_vocab_size=draft_vocab_size,
    )
