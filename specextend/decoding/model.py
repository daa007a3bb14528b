"""A stock causal LM run over our cache, batched, for the target and for standalone drafts.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specextend.attention.hybrid import Attend
from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import CacheHook, KVCache
from specextend.decoding.packed import pack_linears, packs


class CachedModel:
    """A transformers causal LM, the kernels it attends with, and its KV cache."""

    def __init__(self, model: Any, attend: Attend, num_rows: int) -> None:
        self.config: Any = model.config
        self.model, self.attend = model, attend
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.head_dim: int = getattr(self.config, "head_dim", None) or (
            self.config.hidden_size // self.config.num_attention_heads
        )
        self.scale: float = self.head_dim**-0.5
        if packs(self.device, self.dtype):
            pack_linears(model)
        self.cache = KVCache(
            self.config.num_hidden_layers,
            num_rows,
            self.config.num_key_value_heads,
            self.head_dim,
            self.dtype,
            self.device,
        )

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states [B, T, C] after the final norm of token_ids [B, T] at positions [B, T]; rows are written."""
        output = self.model.model(
            input_ids=token_ids,
            position_ids=positions,
            past_key_values=CacheHook(self.cache, plan),
            plan=plan,
            attend=self.attend,
        )
        return output.last_hidden_state

    def forward_with_features(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, and the outputs of `layers` (ascending, counted from 0) side by side: features [B, T, F].

        Without layers the features are the hidden states themselves. Nothing is kept.
        """
        outputs: list[Tensor] = []
        hooks = [
            self.model.model.layers[layer].register_forward_hook(lambda _module, _inputs, out: outputs.append(out))
            for layer in layers
        ]
        try:
            hidden = self.forward(token_ids, positions, plan)
        finally:
            for hook in hooks:
                hook.remove()
        return hidden, torch.cat(outputs, -1) if layers else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden [..., C]."""
        return self.model.lm_head(hidden)
