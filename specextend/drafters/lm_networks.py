"""Causal LMs as draft networks: a small model, or the layer of a checkpoint that predicts the token
after the next (MTP).

A small model reads only visible tokens. In the paper (arXiv 2505.20776) it reads the whole prompt.
Here retrieval comes first, so work and memory do not grow with the document, and a new choice is
read into the rows of tokens that left.

An MTP layer has for position i, with e the embedding of token i + 1 and h the target's last hidden
state at i:

    x = join(concat(norm(e), norm(h)))
    h' = norm(layer(x)), logits by the target's LM head

h' gives token i + 2, and takes the place of h one level further. The layer is a model of the
target's class (`models.checkpoints`), on transformers' layers with our attention and cache.

More shapes: `S` visible tokens.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import DraftCache, DraftRows, KVCache, VisibleCache
from specextend.decoding.device import upload
from specextend.decoding.layers import linear, pack
from specextend.decoding.model import CachedModel
from specextend.decoding.stock import StockDecoder, attention_layers
from specextend.drafters.causal import HISTORY
from specextend.models.model_files import ModelError


@dataclass(slots=True)
class Reading(DraftRows):
    """A sequence's text and visible tokens."""

    text: list[Tensor] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    """Positions of the tokens in the visible rows."""
    wanted: list[int] | None = None

    def tokens_at(self, positions: Sequence[int]) -> Tensor:
        """Return the ids of the tokens at `positions` [n]."""
        device = self.text[0].device
        self.text = [torch.cat([*self.text, upload(torch.tensor(self.decided).long(), device)])]
        self.decided = []
        return self.text[0].index_select(0, upload(torch.tensor(positions), device))

    def replace(self, size: int) -> list[list[int]]:
        """Give new tokens the rows of tokens that left; return runs of these rows.

        If more than half change, or new tokens are no runs of `size`, one run has all rows.
        """
        assert self.wanted is not None
        wanted = [position for position in self.wanted if position < self.length]
        self.wanted = None
        chosen = set(wanted)
        free = [row for row, position in enumerate(self.shown) if position not in chosen]
        new = sorted(chosen.difference(self.shown))
        runs = [free[first : first + size] for first in range(0, len(new), size)]
        are_runs = all(run == [*range(run[0], run[0] + size)] for run in runs if run)
        num_kept = len(self.shown) - len(free)
        if sum(map(len, runs)) != len(new) or not are_runs or 2 * num_kept < len(self.shown):
            self.shown = wanted
            self.visible = len(wanted)
            return [[*range(len(wanted))]]
        for row, position in zip(chain(*runs), new, strict=True):
            self.shown[row] = position
        return runs


class ReadCache(VisibleCache):
    """Rows of a draft that reads what it sees, filled by `ModelNetwork.read`."""

    of: dict[int, Reading]  # type: ignore[assignment]

    def admit(self, slot: int, num_tokens: int, num_working_rows: int) -> bool:
        """Reserve the rows of the visible tokens; return False without room."""
        if not super().admit(slot, num_tokens, num_working_rows):
            return False
        self.of[slot] = Reading(self.of[slot].working)
        return True

    def select(self, slot: int, positions: Tensor) -> None:
        """Choose the tokens at `positions` [S], to be read before the next draft."""
        self.of[slot].wanted = positions.tolist()

    def write_back(self, rows: Tensor, positions: Tensor, full_rows: Tensor) -> None:
        """Keep no copies: a token that is chosen again is read again."""

    def advance(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count the next tokens, after the visible rows."""
        held = self.of[slot]
        held.decided += token_ids
        held.shown += range(held.length, held.length + len(token_ids))
        super().advance(slot, token_ids)


class ModelNetwork:
    """A causal LM of transformers, which ignores the target's hidden states."""

    vocabulary: Tensor | None = None
    hidden_layers: tuple[int, ...] | None = None
    reads_history = False
    at_once = None

    def __init__(
        self,
        model: CachedModel,
        chunk_size: int,
        max_chunk: int,
        num_shared: int | None = None,
        other_id: int = 0,
    ):
        """Take the model.

        Args:
            chunk_size: Tokens that a retrieval shows or hides together.
            max_chunk: Most tokens of a forward.
            num_shared: First ids, shared with the target; None: all. Other ids are never proposed,
                and read as `other_id`.
        """
        self._model = model
        self._chunk_size = chunk_size
        self._max_chunk = max_chunk
        self._num_shared = num_shared
        self._other_id = other_id
        # a head may read narrower states than the layers (OPT-350M)
        self.hidden_size: int = model.model.get_input_embeddings().embedding_dim
        self.cache = ReadCache(model.cache)

    def prefill(self, slot: int, text: Tensor, hidden: Tensor) -> None:
        """Keep a prompt's next chunk, unread."""
        held = self.cache.of[slot]
        held.text.append(text[HISTORY:])
        held.length += len(text) - HISTORY

    def read(self, slots: Sequence[int]) -> int:
        """Read selected tokens without rows; return their number."""
        num_read = 0
        changed: list[tuple[Reading, list[int]]] = []
        for slot in slots:
            held = self.cache.of[slot]
            if held.wanted is None:
                continue
            runs = held.replace(self._chunk_size)
            num_read += sum(map(len, runs))
            if len(runs) == 1:
                rows, step = runs[0], self._max_chunk
                for first in range(0, len(rows), step):
                    self._read([(held, rows[first : first + step])])
            else:
                changed += [(held, run) for run in runs]
        if changed:
            self._read(changed)
        return num_read

    def _read(self, runs: Sequence[tuple[Reading, list[int]]]) -> None:
        token_ids = torch.stack(
            [held.tokens_at([held.shown[row] for row in rows]) for held, rows in runs]
        )
        plan = AttentionPlan(
            starts=[held.working.start for held, _ in runs],
            lengths=[rows[-1] + 1 for _, rows in runs],
            num_new=token_ids.shape[1],
            ends_only=True,
        )
        positions = upload(torch.tensor([rows for _, rows in runs]), token_ids.device)
        self.forward(token_ids, positions, positions, plan, None)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        history: Tensor | None,
    ) -> Tensor:
        """Run the model, see `DraftNetwork.forward`."""
        if self._num_shared is not None:
            token_ids = token_ids.where(token_ids < self._num_shared, self._other_id)
        return self._model.forward(token_ids, positions, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        return self._model.logits(hidden)[..., : self._num_shared]


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
