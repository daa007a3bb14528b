"""A stock causal LM that runs in batches on our cache, for the target and for standalone drafts.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specextend.attention.backends import Attend
from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import CacheHook, KVCache


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
        """Run token_ids [B, T] at positions [B, T], write their rows, return hidden [B, T, C] after the final norm."""
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
        """Run `forward`, and return features [B, T, F] beside it: the outputs of `layers` (ascending) side by side.

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
        """Return logits [..., V] of hidden [..., C]."""
        return self.model.lm_head(hidden)


_ROWS = 16
"""Number of rows for which the packing is optimised; any other number works too."""


class PackedLinear(nn.Module):
    """A bf16 linear layer on the CPU, with its weight packed once for the matrix units.

    torch's own layer reorders its weight for oneDNN in every call, which costs as much as the product of few rows
    (`docs/log.md`). Product and fp32 accumulation are the same.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if packing works and pays: bf16 on a CPU for which torch has oneDNN bf16 kernels."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module` by its packed form, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
