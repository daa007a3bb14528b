"""An EAGLE head in plain torch: one Llama decoder layer over the target's last hidden state.

For slot i, with e the target's embedding of token i + 1 and h the target's last hidden state at position i:

    x  = fc(concat(rmsnorm(e), rmsnorm(h)))
    h' = rmsnorm(decoder_layer(x))

h' approximates the target's hidden state at i + 1, gives token i + 2 through the target's LM head, and takes the
place of h one level further (EAGLE, arXiv 2401.15077; the norms are ours).

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from specextend.attention.hybrid import attend_plan
from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import KVCache
from specextend.decoding.draft_cache import DraftCache, rotate
from specextend.decoding.model import CachedModel
from specextend.decoding.packed import pack_linears, packs
from specextend.drafters.eagle_config import VOCABULARY, EagleConfig


class EagleNetwork:
    """The head's weights, with the embedding and LM head it shares with the target."""

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Tensor],
        target: CachedModel,
        lm_head: Tensor,
        num_full_rows: int,
    ) -> None:
        """`lm_head` [V, C] are the target's rows, of which a reduced vocabulary takes its own."""
        self._config, self._attend = config, target.attend
        self._embedding: Tensor = target.model.get_input_embeddings().weight
        self.vocabulary = weights.get(VOCABULARY)
        tensors = {name: weight for name, weight in weights.items() if name != VOCABULARY}
        self._norms = {name: weight for name, weight in tensors.items() if weight.dim() == 1}
        self._linears = nn.ModuleDict(
            {_module_name(name): _linear(weight) for name, weight in tensors.items() if weight.dim() == 2}
        )
        if self.vocabulary is not None:
            self._linears["lm_head"] = _linear(lm_head[self.vocabulary])
        device, dtype = target.device, target.dtype
        if packs(device, dtype):
            pack_linears(self._linears)
        self._lm_head = target.logits if self.vocabulary is None else self._linears["lm_head"]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        self._inv_freq = config.rope_theta**-exponents
        working = KVCache(1, num_full_rows, config.num_kv_heads, config.head_dim, dtype, device)
        self.cache = DraftCache(working, num_full_rows, self._inv_freq)
        self._pending: dict[int, Tensor] = {}

    def num_staging_rows(self) -> int:
        """Prefill fills the full cache directly."""
        return 0

    def release(self, row: int) -> None:
        """Forget the row."""
        self._pending.pop(row, None)

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Keys and values of every slot whose next token is known; the chunk's last one waits for the next call."""
        if (pending := self._pending.get(row)) is not None:
            hidden = torch.cat([pending, hidden])
        else:
            token_ids = token_ids[1:]
        self._pending[row] = hidden[-1:].clone()
        if len(token_ids):
            normed = self._norm("layer.input_layernorm", self._inputs(token_ids, hidden[:-1]))
            keys, values = (self._heads(name, normed) for name in ("k_proj", "v_proj"))
            self.cache.store(row, keys.unsqueeze(0), values.unsqueeze(0))

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden [B, T, C] of token_ids [B, T], each with the hidden state [B, T, C] one position before it."""
        residual = self._inputs(token_ids, hidden)
        normed = self._norm("layer.input_layernorm", residual)
        query, keys, values = (self._heads(name, normed) for name in ("q_proj", "k_proj", "v_proj"))
        query, keys = (rotate(x, positions, self._inv_freq) for x in (query, keys))
        rows = plan.new_rows(keys.device)
        working = self.cache.working
        working.keys[0].index_copy_(0, rows, keys.flatten(0, 1))
        working.values[0].index_copy_(0, rows, values.flatten(0, 1))
        scale = self._config.head_dim**-0.5
        mixed = attend_plan(self._attend, query, working.keys[0], working.values[0], plan, scale)
        residual = residual + self._linear("layer/self_attn/o_proj", mixed.flatten(2))
        normed = self._norm("layer.post_attention_layernorm", residual)
        gated = silu(self._linear("layer/mlp/gate_proj", normed)) * self._linear("layer/mlp/up_proj", normed)
        return self._norm("norm", residual + self._linear("layer/mlp/down_proj", gated))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden [..., C]."""
        return self._lm_head(hidden)

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self._norm("en", self._embedding[token_ids])
        return self._linear("fc", torch.cat([embedded, self._norm("hn", hidden)], -1))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._linears[name](x)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self._linear(f"layer/self_attn/{name}", x).unflatten(-1, (-1, self._config.head_dim))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self._config.layer_norm_eps if name.startswith("layer.") else self._config.head_norm_eps
        weight = self._norms[f"{name}.weight"]
        return rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def _module_name(tensor_name: str) -> str:
    """`layer.mlp.up_proj.weight` as a name that nn.ModuleDict takes."""
    return tensor_name.removesuffix(".weight").replace(".", "/")


def _linear(weight: Tensor) -> nn.Linear:
    """A bias-free layer around an existing weight [out, in]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
