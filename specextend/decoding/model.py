"""A stock causal LM run over our cache, batched, for the target and for standalone drafts.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specextend.attention.hybrid import Attend
from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import CacheHook, KVCache


class CachedModel:
    """A transformers causal LM, the kernels it attends with, and its KV cache."""

    def __init__(self, model: torch.nn.Module, attend: Attend, num_rows: int) -> None:
        self.model, self.attend, self.config = model, attend, model.config
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.head_dim = getattr(self.config, "head_dim", None) or (
            self.config.hidden_size // self.config.num_attention_heads
        )
        self.scale = self.head_dim**-0.5
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

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden [..., C]."""
        return self.model.lm_head(hidden)
