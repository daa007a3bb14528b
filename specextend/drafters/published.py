"""The network of a published EAGLE head (`formats.py`): one Llama decoder layer over the target's hidden states.

For slot i, with e the embedding of token i + 1:

    EAGLE-1/2   x = fc(concat(e, h)), h the target's last hidden state at i, after its final norm
                h' = x + attention(x) + mlp, logits by the target's LM head
    EAGLE-3     x = fc(concat(outputs of three target layers at i))
                h' = x + attention(concat(rmsnorm(e), rmsnorm(x))) + mlp, logits = lm_head(rmsnorm(h'))

h' takes the place of h, or of x, one level further (arXiv 2401.15077, 2503.01840). Norms and biases that some of the
formats add are applied where the checkpoint has them.

Shapes: `B` sequences, `T` new rows of each, `C` the head's hidden size, `F` features of the target, `D` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from specextend.attention.hybrid import attend_plan
from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import KVCache
from specextend.decoding.draft_cache import DraftCache, rotate
from specextend.decoding.model import CachedModel
from specextend.decoding.packed import pack_linears, packs
from specextend.drafters.formats import PublishedHead, read_tensors, read_vocabulary
from specextend.drafters.linears import linear, linears

_MAPS = ("d2t", "t2d")


class PublishedNetwork:
    """The head's weights, with the embedding and LM head of the target where it has none of its own."""

    def __init__(
        self,
        head: PublishedHead,
        target: CachedModel,
        lm_head: Tensor,
        num_full_rows: int,
        rope: tuple[Tensor, float],
        hidden_layers: tuple[int, ...],
    ) -> None:
        """`lm_head` [V, C]: the target's rows. `rope`: inv_freq [D / 2] and the factor on its sines and cosines."""
        self._head, self._attend = head, target.attend
        self.hidden_layers, self.reads_history = hidden_layers, False
        device, dtype = target.device, target.dtype
        vocabulary = read_vocabulary(head)
        self.vocabulary = None if vocabulary is None else vocabulary.to(device)
        names = [name for name in head.sources if name not in _MAPS]
        weights = {name: each.to(dtype) for name, each in read_tensors(head, names, str(device)).items()}
        self._embedding = _own_or(weights.pop("embed_tokens.weight", None), target.model.get_input_embeddings().weight)
        own_head = _own_or(weights.pop("lm_head.weight", None), lm_head)
        self._norms = {name: weight for name, weight in weights.items() if name.endswith("norm.weight")}
        self._linears = linears({name: weight for name, weight in weights.items() if name not in self._norms})
        if own_head is not lm_head:
            self._linears["lm_head"] = linear(own_head)
        if packs(device, dtype):
            pack_linears(self._linears)
        self._lm_head = self._linears["lm_head"] if own_head is not lm_head else target.logits
        self._inv_freq = rope[0].to(device)
        self._scale = head.head_dim**-0.5 * rope[1] ** 2
        working = KVCache(1, num_full_rows, head.num_kv_heads, head.head_dim, dtype, device)
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
            _, inputs = self._inputs(token_ids, hidden[:-1])
            keys, values = self._heads("k", inputs), self._heads("v", inputs)
            self.cache.store(row, keys.unsqueeze(0), values.unsqueeze(0))

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, history: Tensor | None
    ) -> Tensor:
        """Hidden [B, T, C] of token_ids [B, T], each with features [B, T, F] of the target or [B, T, C] of its own."""
        residual, inputs = self._inputs(token_ids, hidden)
        query, keys = (rotate(self._heads(name, inputs), positions, self._inv_freq) for name in "qk")
        rows = plan.new_rows(keys.device)
        working = self.cache.working
        working.keys[0].index_copy_(0, rows, keys.flatten(0, 1))
        working.values[0].index_copy_(0, rows, self._heads("v", inputs).flatten(0, 1))
        mixed = attend_plan(self._attend, query, working.keys[0], working.values[0], plan, self._scale)
        residual = residual + self._linears["layer/self_attn/o_proj"](mixed.flatten(2))
        normed = self._norm("layer.post_attention_layernorm", residual)
        gate, up, down = (self._linears[f"layer/mlp/{name}_proj"] for name in ("gate", "up", "down"))
        return residual + down(silu(gate(normed)) * up(normed))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden [..., C]."""
        return self._lm_head(self._norm_if_any("norm", hidden))

    def _inputs(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's residual [..., C], and what its queries, keys and values are made of."""
        embedded, fc = self._embedding[token_ids], self._linears["fc"]
        if not self._head.fused:
            fused = fc(torch.cat([self._norm_if_any("embedding_norm", embedded), hidden], -1))
            return fused, self._norm_if_any("layer.input_layernorm", fused)
        if hidden.shape[-1] != self._head.hidden_size:
            hidden = fc(self._norm_if_any("input_norm", hidden))
        normed = self._norm("layer.hidden_norm", hidden)
        inputs = torch.cat([self._norm("layer.input_layernorm", embedded), normed], -1)
        return normed if self._head.norm_before_residual else hidden, inputs

    def _heads(self, name: str, x: Tensor) -> Tensor:
        heads = self._linears[f"layer/self_attn/{name}_proj"](x).unflatten(-1, (-1, self._head.head_dim))
        return self._norm_if_any(f"layer.self_attn.{name}_norm", heads)

    def _norm_if_any(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x) if f"{name}.weight" in self._norms else x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        normed = rms_norm(x.float(), (x.shape[-1],), eps=self._head.norm_eps)
        return normed.to(x.dtype) * self._norms[f"{name}.weight"]


def _own_or(own: Tensor | None, target: Tensor) -> Tensor:
    """The head's own matrix; the target's where there is none, or a copy that would only take memory."""
    return target if own is None or torch.equal(own, target) else own
