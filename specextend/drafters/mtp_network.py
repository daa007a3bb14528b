"""The layer of a checkpoint that predicts the token after the next (MTP), as a draft network.

For position i, with e the embedding of token i + 1 and h the target's last hidden state at i:

    x = join(concat(norm(e), norm(h)))
    h' = norm(layer(x)), logits by the target's LM head

h' gives token i + 2, and takes the place of h one level further. The layer is a model of the
target's class (`models.checkpoints`), on transformers' layers with our attention and cache.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import DraftCache, KVCache
from specextend.decoding.layers import linear, pack
from specextend.decoding.model import CachedModel
from specextend.decoding.stock import StockDecoder, attention_layers
from specextend.drafters.causal import HISTORY
from specextend.models.model_files import ModelError

_FAR = 5
"""A position at which keys of the layer are compared with turned keys."""
_ALIKE = 0.05
"""Difference of two keys, as a share of their size, that rounding explains."""


class MtpNetwork:
    """An MTP layer. It uses the target's embedding and LM head."""

    vocabulary: Tensor | None = None
    hidden_layers: tuple[int, ...] | None = ()
    reads_history = False
    at_once = None

    def __init__(
        self,
        layer: Any,
        joining: Mapping[str, Tensor],
        target: CachedModel,
        num_rows: tuple[int, int],
    ):
        """Take the layer and the target.

        Args:
            layer: A causal LM of one layer, without need of its embedding and LM head.
            joining: Weights of `MTP_JOINING`.
            num_rows: Rows of the full and the working cache.

        Raises:
            ModelError: RoPE turns the layer's keys in a way that is not served.
        """
        self.hidden_size: int = target.config.hidden_size
        self._embedding = target.model.get_input_embeddings()
        self._target = target
        self._norms = {
            name: _norm_like(layer.get_decoder().norm, joining[name])
            for name in ("embedding_norm", "hidden_norm")
        }
        self._linears = nn.ModuleDict({"join": linear(joining["join"])})
        pack(self._linears)
        pack(layer)
        layers = attention_layers(layer)
        num_full, num_working = num_rows
        working = KVCache([layers[0].shape], num_working, target.dtype, target.device)
        self._layer = StockDecoder(layer, layers, target.attend, working)
        inv_freq, turned = _rope_of(layer)
        self.cache = DraftCache(working, num_full, inv_freq, turned)
        self._check_rope()

    def prefill(self, slot: int, text: Tensor, hidden: Tensor) -> None:
        """Store keys and values of all positions with a known next token."""
        text, hidden = self.cache.pair(slot, text, hidden)
        if len(hidden):
            joined = self._join(text[HISTORY:], hidden)
            keys, values = self._layer.project(joined, torch.zeros_like(text[HISTORY:]))
            self.cache.store(slot, keys, values)

    def read(self, slots: Sequence[int]) -> int:
        """Return 0: `prefill` reads all of a prompt."""
        return 0

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        history: Tensor | None,
    ) -> Tensor:
        """Run the layer, see `DraftNetwork.forward`."""
        return self._layer.run(self._join(token_ids, hidden), positions, plan, ())[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the target's logits [..., V] of hidden [..., C]."""
        return self._target.logits(hidden)

    def _join(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self._norms["embedding_norm"](self._embedding(token_ids))
        joined: Tensor = self._linears["join"](
            torch.cat([embedded, self._norms["hidden_norm"](hidden)], -1)
        )
        return joined

    def _check_rope(self) -> None:
        """Raise ModelError unless a turned key is the layer's key at another position."""
        some = torch.arange(_FAR, device=self._target.device)
        joined = self._join(some, self._embedding(some))
        first, far = (self._layer.project(joined, some * 0 + place)[0] for place in (0, _FAR))
        turned = self.cache.turn(first, some * 0 + _FAR)
        if not (turned - far).float().norm() <= _ALIKE * far.float().norm():
            raise ModelError("RoPE turns the keys of the MTP layer in a way that is not served")


def _rope_of(layer: Any) -> tuple[Tensor, tuple[int, int]]:
    """Return RoPE's frequencies, and the elements of a key that it turns.

    They are the last of keys made from a latent, and the first of others.
    """
    rotary = getattr(layer.get_decoder(), "rotary_emb", None)
    if (inv_freq := getattr(rotary, "inv_freq", None)) is None:
        raise ModelError("the MTP layer has no RoPE with one set of frequencies")
    size = 2 * len(inv_freq)
    config = layer.config
    end = config.qk_nope_head_dim + size if hasattr(config, "qk_nope_head_dim") else size
    return inv_freq, (end - size, end)


def _norm_like(norm: Any, weight: Tensor) -> Any:
    made = deepcopy(norm)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made
