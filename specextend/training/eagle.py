"""An EAGLE head as a trainable module, with the tensors of `drafters/eagle_config.py`.

The loss follows the head down its own chain: what it gives for a slot takes the place of the target's hidden state in
the next, as in drafting (arXiv 2503.01840, "training-time test").

Shapes: `S` slots, `Q` asked, `C` hidden size, `H` query heads, `K` key heads, `D` head size, `V` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from specextend.decoding.draft_cache import rotate
from specextend.drafters.eagle_config import VOCABULARY, EagleConfig
from specextend.training.slots import Slots


class EagleHead(nn.Module):
    """The head in fp32, for training; embedding and LM head are the target's and stay as they are."""

    def __init__(self, config: EagleConfig, weights: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor) -> None:
        """`weights`: all tensors of the config. `embedding` [vocabulary, C], `lm_head` [vocabulary, C]."""
        super().__init__()
        self.config = config
        self.embedding: Tensor
        self.lm_head: Tensor
        self.vocabulary: Tensor
        self.inv_freq: Tensor
        tensors = {name: weight.float() for name, weight in weights.items() if name != VOCABULARY}
        self._tensors = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(w) for name, w in tensors.items()})
        self.register_buffer("embedding", embedding.float(), persistent=False)
        vocabulary = weights.get(VOCABULARY)
        self.register_buffer("lm_head", lm_head if vocabulary is None else lm_head[vocabulary], persistent=False)
        everything = torch.arange(len(lm_head), device=lm_head.device) if vocabulary is None else vocabulary
        self.register_buffer("vocabulary", everything, persistent=False)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-exponents, persistent=False)

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors by name, fp32."""
        return {name.replace("/", "."): weight.detach() for name, weight in self._tensors.items()}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def token_ids(self, entries: Tensor) -> Tensor:
        """Token ids of entries of the logits."""
        return self.vocabulary[entries]

    def chain(self, slots: Slots, asked: Tensor, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What the head gives for the slots `asked` [Q], and for those behind them from its own output.

        Yields, for each step, logits [Q, V] and the slots [Q] whose labels they stand against; where a chain has left
        its group (`Slots.follow`) its values mean nothing.
        """
        keys, values = self._keys_values(slots.token_ids, slots.history, slots.hidden, slots.positions)
        visible = slots.visible(asked)
        hidden, own = slots.hidden[asked], torch.eye(len(asked), dtype=torch.bool, device=asked.device)
        for step in range(num_steps):
            at = (asked + step).clamp(max=len(slots.token_ids) - 1)
            token_ids, history, positions = slots.token_ids[at], slots.history[at], slots.positions[asked] + step
            if step:  # a drafted slot sees the real ones up to its root's, and the drafted ones of its own chain
                drafted = self._keys_values(token_ids, history, hidden, positions)
                keys, values = torch.cat([keys, drafted[0]]), torch.cat([values, drafted[1]])
                visible = torch.cat([visible, own], 1)
            hidden = self._layer(token_ids, history, hidden, positions, keys, values, visible)
            yield linear(hidden, self.lm_head.to(hidden.dtype)), at

    def _keys_values(
        self, token_ids: Tensor, history: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[S, K, D] each, the copy heads' last."""
        normed = self._norm("layer.input_layernorm", self._inputs(token_ids, hidden))
        keys = rotate(self._heads("layer.self_attn.k_proj", normed), positions, self.inv_freq)
        values = self._heads("layer.self_attn.v_proj", normed)
        if self.config.copy_heads:
            copied = self._heads("copy.k_proj", self._embed(history).flatten(-2))
            keys = torch.cat([keys, copied], -2)
            values = torch.cat([values, self._heads("copy.v_proj", self._embed(token_ids))], -2)
        return keys, values

    def _layer(
        self,
        token_ids: Tensor,
        history: Tensor,
        hidden: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
    ) -> Tensor:
        residual = self._inputs(token_ids, hidden)
        normed = self._norm("layer.input_layernorm", residual)
        query = rotate(self._heads("layer.self_attn.q_proj", normed), positions, self.inv_freq)
        if self.config.copy_heads:
            latest = torch.cat([token_ids[:, None], history[:, :-1]], 1)
            query = torch.cat([query, self._heads("copy.q_proj", self._embed(latest).flatten(-2))], -2)
        q, k, v = (x.transpose(0, 1)[None].to(residual.dtype) for x in (query, keys, values))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=visible[None, None], enable_gqa=True)
        residual = residual + self._linear("layer.self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1))
        normed = self._norm("layer.post_attention_layernorm", residual)
        gated = silu(self._linear("layer.mlp.gate_proj", normed)) * self._linear("layer.mlp.up_proj", normed)
        return self._norm("norm", residual + self._linear("layer.mlp.down_proj", gated))

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        return self._linear("fc", torch.cat([self._embed(token_ids), self._norm("hn", hidden)], -1))

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._norm("en", self.embedding[token_ids])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self._tensors[f"{name}.weight".replace(".", "/")])

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name, x).unflatten(-1, (-1, self.config.head_dim))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.layer_norm_eps if name.startswith("layer.") else self.config.head_norm_eps
        weight = self._tensors[f"{name}.weight".replace(".", "/")]
        return rms_norm(x.float(), (x.shape[-1],), weight, eps)


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
    # One equal token gives a score of 8 after the scale of D**-0.5.
    queries = 8 * config.head_dim**0.5 * keys.view(config.copy_heads, 1, config.head_dim, -1)
    return {
        **weights,
        "copy.k_proj.weight": keys,
        "copy.q_proj.weight": queries.expand(-1, group, -1, -1).flatten(0, 2).clone(),
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
    return {**weights, "norm.weight": final_norm.detach().float().clone()}
