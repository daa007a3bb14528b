"""A causal LM that runs in batches on our layers and our cache, for the target and for standalone drafts.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specextend.attention.backends import (
    Cell,
    MeasuredAttention,
    cpu_kernels,
    find_faults,
    make_cells,
    measure_attention,
)
from specextend.attention.plan import Attend, AttentionPlan
from specextend.attention.reference import LayerKernels
from specextend.attention.torch_kernels import TORCH
from specextend.attention.trials import Heads, Trial
from specextend.decoding.cache import KVCache
from specextend.decoding.device import device_name, release_cached
from specextend.decoding.layers import Forward, fuse, pack_if_faster, taken_form
from specextend.decoding.measurements import count_work, head_size, kept_or_measured
from specextend.decoding.quantized import Scheme, quantized


class CachedModel:
    """A transformers causal LM, the kernels it attends with, and its KV cache."""

    def __init__(
        self, model: Any, attend: Attend, num_rows: int, kernels: LayerKernels = TORCH, quantize: Scheme | None = None
    ) -> None:
        """Take the model, whose layers are replaced by `FusedLayer`, and what computes between their products.

        quantize: what becomes of the weights of these layers, which may still lie on another device than the others.
        """
        self.config: Any = model.config
        self.model, self.attend, self.kernels = model, attend, kernels
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.head_dim = head_size(self.config)
        self.scale: float = self.head_dim**-0.5
        self.work = count_work(model, self.dtype, quantize)
        """What decoding with it takes."""
        fuse(model, partial(quantized, scheme=quantize))
        release_cached(self.device)  # the weights that were joined
        self.trials = pack_if_faster(model)
        """What came of the kernels that were tried."""
        self.linears = " ".join(filter(None, (quantize, taken_form(self.trials))))
        """How linear layers are multiplied, see `layers` and `quantized`."""
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
        return self.forward_with_features(token_ids, positions, plan, ())[0]

    def forward_with_features(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run `forward`, and return features [B, T, F] beside it: the outputs of `layers` (ascending) side by side.

        Without layers the features are the hidden states themselves. Nothing is kept.
        """
        decoder, outputs = self.model.model, []
        embedded = decoder.embed_tokens(token_ids)
        cos, sin = decoder.rotary_emb(embedded, positions)
        sin[..., : self.head_dim // 2].neg_()
        rows = plan.new_rows(self.device).flatten()
        angles = cos.flatten(0, 1), sin.flatten(0, 1)
        run = Forward(self.kernels, self.attend, plan, self.cache.stored, rows, *angles)
        x = embedded.flatten(0, 1)
        for index, layer in enumerate(decoder.layers):
            x = layer(x, run)
            if index in layers:
                outputs.append(x)
        hidden = decoder.norm(x).unflatten(0, token_ids.shape)
        return hidden, torch.cat(outputs, -1).unflatten(0, token_ids.shape) if layers else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        return self.model.lm_head(hidden)

    def timing_key(self) -> dict[str, Any]:
        """Return what the time of a forward depends on, attention's kernels aside, as JSON values."""
        return {
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "dtype": str(self.dtype),
            "layers": "torch" if self.kernels is TORCH else "kernels",
            "linears": self.linears,
            "head_dim": self.head_dim,
            "model_type": self.config.model_type,
            **{name: value for name, value in self.config.to_dict().items() if type(value) is int},
        }

    def choose_kernels(self) -> None:
        """Attend from now on with the fastest of a CPU's kernels for each call, by what is kept or measured now.

        Measuring writes to the cache, so no request may be running.
        """
        kernels, cells = cpu_kernels(self.head_dim, self.dtype), make_cells(self.cache.rows.num_free)
        key = self.timing_key() | {"kernels": [*kernels], "cells": [[*cell] for cell in cells]}
        config, stored = self.config, self.cache.stored
        heads = config.num_attention_heads, config.num_key_value_heads, self.head_dim

        @torch.inference_mode()
        def measure() -> dict[str, Any]:
            faults = find_faults(kernels, Heads(*heads, self.dtype, self.device))
            right = {name: attend for name, attend in kernels.items() if name not in faults}
            stored[..., : max(length for _, _, length in cells), :] = 0
            seconds = measure_attention(stored, config.num_attention_heads, right, cells)
            return {"faults": faults, "seconds": [seconds[cell] for cell in cells]}

        found = kept_or_measured("attention", key, measure)
        seconds = dict(zip(cells, found["seconds"], strict=True))
        choices = {cell: min(times, key=times.__getitem__) for cell, times in seconds.items()}
        self.attend = MeasuredAttention(kernels, choices)
        self.trials += tuple(_trial(name, found["faults"].get(name, ""), seconds, choices) for name in kernels)


def _trial(name: str, fault: str, seconds: Mapping[Cell, Mapping[str, float]], choices: Mapping[Cell, str]) -> Trial:
    """Sum up what came of a CPU's kernel."""
    num_taken = sum(choice == name for choice in choices.values())
    ms = {
        f"{num_queries} {'masked ' * masked}behind {length}": 1e3 * times[name]
        for (masked, num_queries, length), times in seconds.items()
        if name in times
    }
    why = fault or f"the fastest for {num_taken} of {len(choices)} kinds of call"
    return Trial(name=f"attention: {name}", taken=num_taken > 0, why=why, ms=ms, is_wrong=bool(fault))
