"""A causal LM that runs in batches on our layers and our cache, for the target and for standalone
drafts.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specextend.attention.backends import Trial, compiled_is_right
from specextend.attention.plain import LayerKernels
from specextend.attention.plan import Attend, AttentionPlan
from specextend.attention.torch_kernels import TORCH
from specextend.decoding.cache import KVCache
from specextend.decoding.device import device_name, release_cached
from specextend.decoding.layers import CompiledLinear, Forward, fuse, joined_in_one_call, pack
from specextend.decoding.quantized import Scheme, quantized, saved_bytes
from specextend.stats import ModelWork


def count_work(model: Any, dtype: torch.dtype, quantize: Scheme | None = None) -> ModelWork:
    """Count what decoding with a transformers causal LM takes, whose weights may be on `meta`.

    quantize: what is to become of the weights of its layers.
    """
    config = model.config
    head = model.lm_head.weight.numel()
    linears = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    # of an embedding of its own, a step reads one row
    unread = 0 if config.tie_word_embeddings else head
    num_weights = sum(parameter.numel() for parameter in model.parameters()) - unread
    head_dim = head_size(config)
    return ModelWork(
        weight_bytes=num_weights * dtype.itemsize - saved_bytes(model, quantize, dtype),
        kv_bytes_per_token=2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * head_dim
        * dtype.itemsize,
        layer_parameters=linears - head,
        head_parameters=head,
        attention_flop_per_pair=4
        * config.num_hidden_layers
        * config.num_attention_heads
        * head_dim,
    )


def head_size(config: Any) -> int:
    """Return the elements of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class CachedModel:
    """A transformers causal LM, the kernels it attends with, and its KV cache."""

    def __init__(
        self,
        model: Any,
        attend: Attend,
        num_rows: int,
        kernels: LayerKernels = TORCH,
        quantize: Scheme | None = None,
    ):
        """Take the model, whose layers are replaced by `FusedLayer`, and what computes between
        their products.

        quantize: what becomes of the weights of these layers, which may still lie on another device
        than the others.
        """
        self.config: Any = model.config
        self.model = model
        self.attend = attend
        self.kernels = kernels
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
        """Run token_ids [B, T] at positions [B, T], write their rows, return hidden [B, T, C] after
        the final norm.
        """
        return self.forward_with_features(token_ids, positions, plan, ())[0]

    def forward_with_features(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        layers: tuple[int, ...] | None,
    ) -> tuple[Tensor, Tensor]:
        """Run `forward`, and return features [B, T, F] beside it: the outputs of `layers`
        (ascending) side by side.

        Without layers the features are the hidden states themselves, and with None there are no
        features (F = 0). Where the plan is for ends only, hidden may be [B, 1, C]. Nothing is kept.
        """
        model = self.model.model
        embedded = model.embed_tokens(token_ids)
        cos, sin = model.rotary_emb(embedded, positions)
        sin[..., : self.head_dim // 2].neg_()
        x, cos, sin = (each.flatten(0, 1) for each in (embedded, cos, sin))
        wanted = layers or ()
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
        if layers == ():
            return hidden, hidden
        features = torch.cat([embedded[..., :0].flatten(0, 1), *outputs], -1)
        return hidden, features.unflatten(0, token_ids.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        return self.model.lm_head(hidden)

    def timing_key(self) -> dict[str, Any]:
        """Return what the time of a forward depends on, attention's kernels aside, as JSON
        values.
        """
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

    def join_layers(self) -> None:
        """Run all layers in one compiled call from now on, if that can be made here."""
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
