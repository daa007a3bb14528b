"""A causal LM that runs in batches on our layers and our cache, for the target and for standalone drafts.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specextend.attention.backends import compiled_is_right
from specextend.attention.plain import LayerKernels
from specextend.attention.plan import Attend, AttentionPlan
from specextend.attention.torch_kernels import TORCH
from specextend.attention.trials import Trial, what_differs
from specextend.decoding.cache import KVCache
from specextend.decoding.device import device_name, release_cached
from specextend.decoding.layers import CompiledLinear, Forward, fuse, joined_in_one_call, pack
from specextend.decoding.measurements import count_work, head_size
from specextend.decoding.quantized import Scheme, quantized

_TRIED_ROWS = (1, 16, 256)
"""Rows of a plain step, a tree and a chunk with which the first layer is checked."""


class CachedModel:
    """A transformers causal LM, the kernels it attends with, and its KV cache."""

    def __init__(
        self, model: Any, attend: Attend, num_rows: int, kernels: LayerKernels = TORCH, quantize: Scheme | None = None
    ):
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
        pack(model)
        self.trials: tuple[Trial, ...] = ()
        """What came of the kernels that were tried."""
        is_compiled = any(isinstance(module, CompiledLinear) for module in model.modules())
        self.linears = " ".join(filter(None, (quantize, "compiled" if is_compiled else "torch")))
        """How linear layers are multiplied, see `layers` and `quantized`."""
        self._decoder: Any = None
        """What runs all layers in one call."""
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

    @torch.inference_mode()
    def join_layers(self) -> None:
        """Run all layers in one compiled call from now on, if that can be made here and its first layer is right.

        The check writes to the cache, so no request may be running.
        """
        layers, fault, why = self.model.model.layers, "", "torch runs this model, type or processor"
        decoder = joined_in_one_call(layers, self.scale)
        if decoder is not None:
            fault = self._fault(joined_in_one_call(layers[:1], self.scale))
            why = fault or f"by {decoder.instructions}"
        if decoder is not None and not fault:
            self._decoder = decoder
        attends = compiled_is_right(self.dtype)
        why_attention = "compiled for this processor" if attends else "torch's own kernel attends"
        self.trials += (
            Trial(name="compiled attention", taken=attends, why=why_attention),
            Trial(name="compiled layers", taken=self.runs_in_one_call, why=why, is_wrong=bool(fault)),
        )

    def _plan(self, num_rows: int) -> AttentionPlan:
        """Plan a call for a check: a tree where a step has one, else a causal chunk."""
        mask = torch.ones(1, num_rows, num_rows, dtype=torch.bool).tril() if 1 < num_rows < _TRIED_ROWS[-1] else None
        return AttentionPlan([0], [num_rows], num_rows, mask, tree="dense")

    def _drawn(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs of layers at the first positions."""
        generator = torch.Generator().manual_seed(num_rows)
        x = torch.randn(1, num_rows, self.config.hidden_size, generator=generator).to(self.dtype)
        return self._with_angles(x, torch.arange(num_rows).unsqueeze(0))

    def _fault(self, decoder: Any) -> str:
        """Return what is wrong with a decoder of the first layer."""
        stored = self.cache.stored[0]
        for rows in _TRIED_ROWS:
            if rows > self.cache.rows.num_free:
                break
            results = []
            for each in (None, decoder):
                plan = self._plan(rows)
                x = self._run_layers(each, self.model.model.layers[:1], self._drawn(rows), plan, ())[0]
                results.append((x, stored[..., :rows, :].clone()))
            if wrong := next(filter(None, map(what_differs, results[1], results[0])), ""):
                return f"{wrong} at R = {rows}"
        return ""
