"""An EAGLE head in plain torch: one Llama decoder layer over the target's last hidden state.

For slot i, with e the target's embedding of token i + 1 and h the target's last hidden state at position i:

    x  = fc(concat(rmsnorm(e), rmsnorm(h)))
    h' = rmsnorm(decoder_layer(x))

h' approximates the target's hidden state at i + 1, gives token i + 2 through the target's LM head, and takes the
place of h one level further (EAGLE, arXiv 2401.15077; the norms are ours).

Copy heads are further heads of the layer's attention, which find where the text said the same before and bring what
came next. They read tokens alone, and where those stand does not matter (no RoPE). With e of i + 1, i, i - 1, i - 2:

    query = copy.q_proj(concat(e[i + 1], e[i], e[i - 1])),  key = copy.k_proj(concat(e[i], e[i - 1], e[i - 2])),
    value = copy.v_proj(e[i + 1]), each e behind its rmsnorm

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from specextend.attention.hybrid import attend_plan
from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import KVCache
from specextend.decoding.draft_cache import DraftCache, rotate
from specextend.decoding.model import CachedModel
from specextend.decoding.packed import pack_linears, packs
from specextend.drafters.eagle_config import VOCABULARY, EagleConfig
from specextend.drafters.linears import linear, linears
from specextend.drafters.network import HISTORY, histories, last_tokens

_COPY_READS = {"q_proj": (0, 3), "k_proj": (1, 4), "v_proj": (0, 1)}
"""First and last (exclusive) of the tokens i + 1, i, i - 1, i - 2 that a projection of the copy heads reads."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """What a prefill has left for its next chunk."""

    last: Tensor  # [3] tokens
    hidden: Tensor  # [1, C] at the last one, whose slot waits for the next token


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
        self._linears = linears({name: weight for name, weight in tensors.items() if weight.dim() == 2})
        if self.vocabulary is not None:
            self._linears["lm_head"] = linear(lm_head[self.vocabulary])
        device, dtype = target.device, target.dtype
        if packs(device, dtype):
            pack_linears(self._linears)
        self._lm_head = target.logits if self.vocabulary is None else self._linears["lm_head"]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        self._inv_freq = config.rope_theta**-exponents
        copy_heads = config.copy_heads or 0
        self.hidden_layers: tuple[int, ...] = ()
        self.reads_history = copy_heads > 0
        working = KVCache(1, num_full_rows, config.num_kv_heads + copy_heads, config.head_dim, dtype, device)
        inv_freq = torch.stack([self._inv_freq] * config.num_kv_heads + [self._inv_freq * 0] * copy_heads)
        self.cache = DraftCache(working, num_full_rows, inv_freq if self.reads_history else self._inv_freq)
        self._pending: dict[int, _Pending] = {}

    def num_staging_rows(self) -> int:
        """Prefill fills the full cache directly."""
        return 0

    def release(self, row: int) -> None:
        """Forget the row."""
        self._pending.pop(row, None)

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Keys and values of every slot whose next token is known; the chunk's last one waits for the next call."""
        pending = self._pending.get(row)
        text = last_tokens(None if pending is None else pending.last, token_ids)
        if pending is None:
            text, token_ids = text[1:], token_ids[1:]
        else:
            hidden = torch.cat([pending.hidden, hidden])
        self._pending[row] = _Pending(text[-HISTORY:], hidden[-1:].clone())
        if len(token_ids):
            embedded = self._embedded(token_ids, histories(text) if self.reads_history else None)
            normed = self._norm("layer.input_layernorm", self._inputs(embedded, hidden[:-1]))
            projected = {name: self._heads(name, normed) for name in ("k_proj", "v_proj")}
            keys, values = self._with_copies(projected, embedded)
            self.cache.store(row, keys.unsqueeze(0), values.unsqueeze(0))

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, history: Tensor | None
    ) -> Tensor:
        """Hidden [B, T, C] of token_ids [B, T], each with the hidden state [B, T, C] one position before it."""
        embedded = self._embedded(token_ids, history)
        residual = self._inputs(embedded, hidden)
        normed = self._norm("layer.input_layernorm", residual)
        projected = {name: self._heads(name, normed) for name in ("q_proj", "k_proj", "v_proj")}
        for name in ("q_proj", "k_proj"):
            projected[name] = rotate(projected[name], positions, self._inv_freq)
        query, keys, values = self._with_copies(projected, embedded)
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

    def _embedded(self, token_ids: Tensor, history: Tensor | None) -> Tensor:
        """[..., C] of token_ids [...], or [..., 4C] of them and the three tokens before each, all normalised."""
        if history is None:
            return self._norm("en", self._embedding[token_ids])
        return self._norm("en", self._embedding[torch.cat([token_ids.unsqueeze(-1), history], -1)]).flatten(-2)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        own = embedded[..., : self._config.hidden_size]
        return self._linear("fc", torch.cat([own, self._norm("hn", hidden)], -1))

    def _with_copies(self, projected: Mapping[str, Tensor], embedded: Tensor) -> list[Tensor]:
        """The projections [..., heads, D], each with its copy heads behind the others, if there are any."""
        if not self.reads_history:
            return list(projected.values())
        return [torch.cat([own, self._copies(name, embedded)], -2) for name, own in projected.items()]

    def _copies(self, name: str, embedded: Tensor) -> Tensor:
        """[..., heads, D] of embedded [..., 4C]."""
        first, last = (token * self._config.hidden_size for token in _COPY_READS[name])
        return self._linear(f"copy/{name}", embedded[..., first:last]).unflatten(-1, (-1, self._config.head_dim))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._linears[name](x)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self._linear(f"layer/self_attn/{name}", x).unflatten(-1, (-1, self._config.head_dim))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self._config.layer_norm_eps if name.startswith("layer.") else self._config.head_norm_eps
        weight = self._norms[f"{name}.weight"]
        return rms_norm(x, (x.shape[-1],), eps=eps) * weight  # fp32 inside
