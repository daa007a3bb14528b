"""A causal LM on our cache, in batches: the target or a standalone draft.

Llama's family runs on our layers (`layers`), any other on those of transformers (`stock`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specextend.attention.backends import Trial, compiled_is_right
from specextend.attention.plain import LayerKernels
from specextend.attention.plan import Attend, AttentionPlan
from specextend.attention.torch_kernels import TORCH
from specextend.decoding.cache import KVCache, RecentSizes
from specextend.decoding.device import device_name, release_cached
from specextend.decoding.layers import (
    CompiledLinear,
    Forward,
    fuse,
    joined_in_one_call,
    pack,
    why_not_fused,
)
from specextend.decoding.quantized import Scheme, quantized, saved_bytes
from specextend.decoding.stock import AttentionLayer, StockDecoder, attention_layers, decoder_of
from specextend.stats import ModelWork

_CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "num_experts_per_token",
)


def count_work(
    model: Any,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    quantize: Scheme | None = None,
) -> ModelWork:
    """Count the work of decoding with a causal LM, whose weights may be on `meta`.

    `dtype` is the type of its weights before `quantize`.
    """
    config = model.config.get_text_config()
    decoder = decoder_of(model)
    linears = sum(
        module.weight.numel() for module in decoder.modules() if isinstance(module, nn.Linear)
    )
    experts, share = expert_parameters(model)
    idle = int(experts * (1 - share))
    # a window takes the same at any length
    whole = [layer for layer in layers if layer.window is None]
    # a step reads one row of the embedding, which is as large as the head
    num_weights = sum(parameter.numel() for parameter in decoder.parameters()) - idle
    return ModelWork(
        weight_bytes=num_weights * dtype.itemsize
        - saved_bytes(model, quantize, dtype, model.device),
        kv_bytes_per_token=sum(layer.numbers for layer in whole) * dtype.itemsize,
        layer_parameters=linears + experts - idle,
        head_parameters=model.get_output_embeddings().weight.numel(),
        attention_flop_per_pair=4
        * config.num_attention_heads
        * sum(layer.head_dim for layer in whole),
    )


def expert_parameters(model: Any) -> tuple[int, float]:
    """Return the number of experts' weights, and the share of them for one token.

    Experts are tensors [experts, outputs, inputs].
    """
    experts = [
        weight
        for name, weight in model.named_parameters()
        if ".experts." in name and weight.dim() == 3
    ]
    chosen = chosen_experts(model.config)
    if not experts or not chosen:
        return sum(weight.numel() for weight in experts), 1.0
    return sum(weight.numel() for weight in experts), min(1.0, chosen / len(experts[0]))


def chosen_experts(config: Any) -> int:
    """Return the experts of a token in a layer; 0 if the config names none."""
    text = config.get_text_config()
    named = (getattr(text, name) for name in _CHOSEN_EXPERTS if hasattr(text, name))
    number = next(named, None)
    return number if isinstance(number, int) else 0


def layers_of(model: Any) -> list[AttentionLayer]:
    """Return the attention of each layer of a causal LM. Weights may be on `meta`."""
    config = model.config
    if why_not_fused(config):
        return attention_layers(model)
    head_dim = head_size(config)
    layer = AttentionLayer(config.num_key_value_heads, head_dim, None, head_dim**-0.5)
    return [layer] * config.num_hidden_layers


def head_size(config: Any) -> int:
    """Return the elements of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class CachedModel:
    """A causal LM of transformers with our kernels and cache."""

    def __init__(
        self,
        model: Any,
        attend: Attend,
        num_rows: int,
        kernels: LayerKernels = TORCH,
        quantize: Scheme | None = None,
        recent: RecentSizes | None = None,
    ):
        """Take the model, and replace layers of Llama's family by `FusedLayer`.

        Args:
            num_rows: Rows of the cache.
            kernels: Kernels between the products of fused layers.
            quantize: Quantization of fused layers, which may lie on another device than the rest.
            recent: See `KVCache`.
        """
        self.config: Any = model.config.get_text_config()
        self.model = model
        self.attend = attend
        self.kernels = kernels
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.layers = layers_of(model)
        whole = [layer for layer in self.layers if layer.num_kv_heads and layer.window is None]
        self.scale: float = (whole or self.layers)[-1].scale
        """Factor on the scores of full attention."""
        self.work = count_work(model, self.layers, self.dtype, quantize)
        self.is_fused = not why_not_fused(model.config)
        if self.is_fused:
            fuse(model, partial(quantized, scheme=quantize))
            release_cached(self.device)  # the separate weights
        pack(model)
        self.trials: tuple[Trial, ...] = ()
        """Results of tried kernels."""
        is_compiled = any(isinstance(module, CompiledLinear) for module in model.modules())
        self.linears = " ".join(filter(None, (quantize, "compiled" if is_compiled else "torch")))
        """Kind of products of linear layers."""
        self._decoder: Any = None
        """All layers in one call; None: layer by layer."""
        shapes = [layer.shape for layer in self.layers]
        windowed = [n for n, layer in enumerate(self.layers) if layer.window is not None]
        self.cache = KVCache(shapes, num_rows, self.dtype, self.device, recent, windowed)
        self._stock = (
            None if self.is_fused else StockDecoder(model, self.layers, attend, self.cache)
        )

    @property
    def is_recurrent(self) -> bool:
        """Return True if a layer has a recurrent state; then only chains are verified."""
        return self._stock is not None and bool(self._stock.recurrent)

    def take_over(self, start: int, num_tokens: int) -> int:
        """Begin a prompt with `num_tokens` in common with the last prompt.

        Return the tokens already read: fewer if recurrent states, or rows of layers with a window,
        are gone.
        """
        return num_tokens if self._stock is None else self._stock.take_over(start, num_tokens)

    def end_prompt(self, start: int, num_tokens: int) -> None:
        """End a prompt of `num_tokens` with the first cache row `start`."""
        if self.cache.recent is not None:
            self.cache.recent.settle(start, num_tokens)

    def assume_read(self, starts: Sequence[int], num_tokens: int) -> None:
        """Count `num_tokens` as read by sequences at `starts`, to measure steps."""
        if self._stock is not None:
            self._stock.assume_read(starts, num_tokens)

    @property
    def runs_in_one_call(self) -> bool:
        """Return True if all layers run in one call."""
        return self._decoder is not None

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Run tokens [B, T] at positions [B, T], and write their rows.

        Return hidden [B, T, C] after the final norm.
        """
        return self.forward_with_features(token_ids, positions, plan, ())[0]

    def forward_with_features(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        layers: tuple[int, ...] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden [B, T or 1, C] and features [B, T, F].

        Features are the outputs of `layers`, ascending. Empty: the hidden states. None: F = 0.
        """
        run = self._run_fused if self._stock is None else self._stock.run
        hidden, outputs = run(token_ids, positions, plan, layers or ())
        if layers == ():
            return hidden, hidden
        empty = hidden.new_empty(*token_ids.shape, 0)
        return hidden, torch.cat([empty, *outputs], -1)

    def _run_fused(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, wanted: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        model = self.model.model
        embedded = model.embed_tokens(token_ids)
        cos, sin = model.rotary_emb(embedded, positions)
        sin[..., : sin.shape[-1] // 2].neg_()
        x, cos, sin = (each.flatten(0, 1) for each in (embedded, cos, sin))
        if self._decoder is not None and len(plan.spans) == 1:
            x, outputs = self._decoder.run(x, cos, sin, plan, self.cache.stored, wanted)
        else:
            rows = plan.new_rows(self.device).flatten()
            run = Forward(self.kernels, self.attend, plan, self.cache.stored, rows, cos, sin)
            outputs = []
            for index, layer in enumerate(model.layers):
                x = layer(x, run)
                if index in wanted:
                    outputs.append(x)
        hidden = model.norm(x).unflatten(0, (len(token_ids), -1))
        return hidden, [output.unflatten(0, token_ids.shape) for output in outputs]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        head: Callable[[Tensor], Tensor] = (
            self.model.lm_head if self._stock is None else self._stock.logits
        )
        return head(hidden)

    def timing_key(self) -> dict[str, Any]:
        """Return everything with an influence on times except attention, as JSON values."""
        return {
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "dtype": str(self.dtype),
            "layers": self._how_layers_run(),
            "linears": self.linears,
            "one_call": self._decoder is not None,
            "head_dim": head_size(self.config),
            "model_type": self.config.model_type,
            **{name: value for name, value in self.config.to_dict().items() if type(value) is int},
        }

    def _how_layers_run(self) -> str:
        if not self.is_fused:
            return "stock"
        return "torch" if self.kernels is TORCH else "kernels"

    def join_layers(self) -> None:
        """Run all layers in one compiled call from now on, if possible."""
        if not self.is_fused:
            return
        attends = compiled_is_right(self.dtype)
        why = "torch runs this model, type or processor"
        self._decoder = joined_in_one_call(self.model.model.layers, self.scale) if attends else None
        if self._decoder is not None:
            why = f"by {self._decoder.instructions}"
        why_attention = "compiled for this processor" if attends else "torch's own kernel attends"
        self.trials += (
            Trial(name="compiled attention", taken=attends, why=why_attention),
            Trial(name="compiled layers", taken=self.runs_in_one_call, why=why),
        )
