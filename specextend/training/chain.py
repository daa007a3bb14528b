"""What trained heads have in common: half of a Llama layer, and the way down a chain of drafted tokens.

The loss follows a head on its own output: what it gives for a slot takes the place of the target's features in the
next, as in drafting (arXiv 2503.01840, "training-time test").

Shapes: `S` slots, `Q` asked, `C` hidden size, `H` query heads, `K` key heads, `D` head size, `V` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from specextend.training.slots import Places, Slots


class Head(Protocol):
    """A head that can be trained: a slot's places and hidden states in, the next hidden state out."""

    vocabulary: Tensor
    """[V] token ids of the logits"""
    target_rows: Tensor
    """[V, C] of the target's LM head"""

    def keys_values(self, places: Places, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n, K, D] each, of slots with hidden [n, F] of the target or [n, C] of the head's own."""

    def layer(self, places: Places, hidden: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Output [n, C] of slots that see keys and values [m, K, D] as `visible` [n, m] says."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] of outputs [n, C]."""


def chain(head: Head, slots: Slots, asked: Tensor, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a head gives for the slots `asked` [Q], and for those behind them from its own output.

    Yields, for each step, outputs [Q, C] and the slots [Q] whose labels they stand against; where a chain has left its
    group (`Slots.follow`) its values mean nothing.
    """
    keys, values = head.keys_values(slots.places, slots.hidden)
    visible = slots.visible(asked)
    hidden, own = slots.hidden[asked], torch.eye(len(asked), dtype=torch.bool, device=asked.device)
    for step in range(num_steps):
        at = (asked + step).clamp(max=len(slots.groups) - 1)
        places = slots.places.at(at)
        if step:  # a drafted slot sees the real ones up to its root's, and the drafted ones of its own chain
            drafted = head.keys_values(places, hidden)
            keys, values = torch.cat([keys, drafted[0]]), torch.cat([values, drafted[1]])
            visible = torch.cat([visible, own], 1)
        hidden = head.layer(places, hidden, keys, values, visible)
        yield hidden, at


class Tensors(nn.Module):
    """A head's trained tensors in fp32, by the names of its format, and what is done with them."""

    def __init__(self, weights: Mapping[str, Tensor], head_dim: int, layer_eps: float, head_eps: float) -> None:
        """`layer_eps` and `head_eps`: of the norms inside the layer and of the others."""
        super().__init__()
        self._head_dim, self._layer_eps, self._head_eps = head_dim, layer_eps, head_eps
        named = {name.replace(".", "/"): nn.Parameter(weight.float()) for name, weight in weights.items()}
        self._tensors = nn.ParameterDict(named)

    def values(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name.replace("/", "."): weight.detach() for name, weight in self._tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        """[..., out] of x [..., in]."""
        return linear(x, self._of(name))

    def heads(self, name: str, x: Tensor) -> Tensor:
        """[..., heads, D] of x [..., in]."""
        return self.linear(name, x).unflatten(-1, (-1, self._head_dim))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm, in fp32."""
        eps = self._layer_eps if name.startswith("layer.") else self._head_eps
        return rms_norm(x.float(), (x.shape[-1],), self._of(name), eps)

    def finish(self, residual: Tensor, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """[n, C]: residual [n, C], attention of query [n, H, D] over what is `visible` [n, m], and the MLP."""
        q, k, v = (x.transpose(0, 1)[None].to(residual.dtype) for x in (query, keys, values))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=visible[None, None], enable_gqa=True)
        residual = residual + self.linear("layer.self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1))
        normed = self.norm("layer.post_attention_layernorm", residual)
        gated = silu(self.linear("layer.mlp.gate_proj", normed)) * self.linear("layer.mlp.up_proj", normed)
        return residual + self.linear("layer.mlp.down_proj", gated)

    def _of(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight".replace(".", "/")]
