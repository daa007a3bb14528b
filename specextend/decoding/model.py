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
    shortest_runs,
)
from specextend.attention.plan import Attend, AttentionPlan
from specextend.attention.reference import LayerKernels
from specextend.attention.torch_kernels import TORCH
from specextend.attention.trials import Heads, Trial, what_differs
from specextend.core import counted
from specextend.decoding.cache import KVCache
from specextend.decoding.device import device_name, release_cached
from specextend.decoding.layers import (
    FEW_ROWS,
    MANY_ROWS,
    Forward,
    fastest,
    fuse,
    joined_in_one_call,
    pack_if_faster,
    taken_form,
)
from specextend.decoding.measurements import count_work, head_size, kept_or_measured
from specextend.decoding.quantized import Scheme, quantized

_PREFIX = 512
"""Rows behind which layers are timed, at most."""
_RUNS = 3
_ONE_CALL = "layers: one call"


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
        self._decoder: Any = None
        """What runs all layers in one call, if that was found to be right and faster."""
        self.cache = KVCache(
            self.config.num_hidden_layers,
            num_rows,
            self.config.num_key_value_heads,
            self.head_dim,
            self.dtype,
            self.device,
        )

    @property
    def runs_in_one_call(self) -> bool:
        """Return True if its layers run in one call."""
        return self._decoder is not None

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Run token_ids [B, T] at positions [B, T], write their rows, return hidden [B, T, C] after the final norm."""
        return self.forward_with_features(token_ids, positions, plan, ())[0]

    def forward_with_features(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run `forward`, and return features [B, T, F] beside it: the outputs of `layers` (ascending) side by side.

        Without layers the features are the hidden states themselves. Nothing is kept.
        """
        decoder = self.model.model
        inputs = self._with_angles(decoder.embed_tokens(token_ids), positions)
        x, outputs = self._run_layers(self._decoder, decoder.layers, inputs, plan, layers)
        hidden = decoder.norm(x).unflatten(0, token_ids.shape)
        return hidden, torch.cat(outputs, -1).unflatten(0, token_ids.shape) if layers else hidden

    def _with_angles(self, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what layers are given for the rows of [B, T]: x [R, C], cos and sin [R, D]."""
        cos, sin = self.model.model.rotary_emb(embedded, positions)
        sin[..., : self.head_dim // 2].neg_()
        return embedded.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1)

    def _run_layers(
        self, decoder: Any, layers: Any, inputs: tuple[Tensor, ...], plan: AttentionPlan, kept: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run layers in one call of `decoder`, if there is one; return the output, and those of the layers `kept`."""
        x, *angles = inputs
        if decoder is not None and len(plan.spans) == 1:
            return decoder.run(x, *angles, plan, self.cache.stored, kept)
        rows = plan.new_rows(self.device).flatten()
        run, outputs = Forward(self.kernels, self.attend, plan, self.cache.stored, rows, *angles), []
        for index, layer in enumerate(layers):
            x = layer(x, run)
            if index in kept:
                outputs.append(x)
        return x, outputs

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
            "one_call": self._decoder is not None,
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
        self._try_one_call()

    def _try_one_call(self) -> None:
        """Run all layers in one call from now on, if that is right and faster, by what is kept or measured now."""
        layers, prefix = self.model.model.layers, min(_PREFIX, self.cache.rows.num_free - MANY_ROWS)
        decoder = joined_in_one_call(layers, self.scale) if prefix >= 0 else None
        if decoder is None:
            return

        @torch.inference_mode()
        def measure() -> dict[str, Any]:
            self.cache.stored[..., : prefix + MANY_ROWS, :] = 0
            if fault := self._fault(joined_in_one_call(layers[:1], self.scale)):
                return {"fault": fault, "seconds": []}
            seconds = []
            for rows in (*FEW_ROWS, MANY_ROWS):
                call = layers, self._drawn(rows), self._plan(rows, prefix), ()
                candidates = {"layers": None, _ONE_CALL: decoder}
                runs = {name: partial(self._run_layers, each, *call) for name, each in candidates.items()}
                seconds.append(shortest_runs(runs, _RUNS))
            return {"fault": "", "seconds": seconds}

        found = kept_or_measured("one-call", self.timing_key() | {"prefix": prefix}, measure)
        times = dict(zip((*FEW_ROWS, MANY_ROWS), found["seconds"], strict=False))
        if times and fastest(times) == _ONE_CALL:
            self._decoder = decoder
        why = found["fault"] or ("slower" if self._decoder is None else "the fastest for few rows")
        ms = {f"{counted(rows, 'row')} behind {prefix}": 1e3 * each[_ONE_CALL] for rows, each in times.items()}
        base = {f"{counted(rows, 'row')} behind {prefix}": 1e3 * each["layers"] for rows, each in times.items()}
        taken, is_wrong = self._decoder is not None, bool(found["fault"])
        self.trials += (Trial(name=_ONE_CALL, taken=taken, why=why, ms=ms, base_ms=base, is_wrong=is_wrong),)

    def _plan(self, num_rows: int, prefix: int) -> AttentionPlan:
        """Plan a call for a trial: a tree where a step has one, else a causal chunk."""
        mask = torch.ones(1, num_rows, num_rows, dtype=torch.bool).tril() if 1 < num_rows < MANY_ROWS else None
        return AttentionPlan([0], [prefix + num_rows], num_rows, mask, tree="dense")

    def _drawn(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs of layers at the first positions."""
        generator = torch.Generator().manual_seed(num_rows)
        x = torch.randn(1, num_rows, self.config.hidden_size, generator=generator).to(self.dtype)
        return self._with_angles(x, torch.arange(num_rows).unsqueeze(0))

    def _fault(self, decoder: Any) -> str:
        """Return what is wrong with a decoder of the first layer."""
        stored = self.cache.stored[0]
        for rows in (*FEW_ROWS, MANY_ROWS):
            results = []
            for each in (None, decoder):
                plan = self._plan(rows, 0)
                x = self._run_layers(each, self.model.model.layers[:1], self._drawn(rows), plan, ())[0]
                results.append((x, stored[..., :rows, :].clone()))
            if wrong := next(filter(None, map(what_differs, results[1], results[0])), ""):
                return f"{wrong} at R = {rows}"
        return ""


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
