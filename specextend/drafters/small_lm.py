"""A small standalone causal LM as the draft.

Shapes: `L` layers, `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import DraftCache
from specextend.decoding.model import CachedModel
from specextend.drafters.causal import HISTORY


class ModelNetwork:
    """A stock transformers LM. It reads tokens only and ignores the target's hidden states."""

    def __init__(
        self,
        model: CachedModel,
        num_full_rows: int,
        prefill_window: int,
        max_chunk: int,
        num_shared: int | None = None,
        other_id: int = 0,
    ):
        """Take the model.

        It proposes the ids below `num_shared`, and reads `other_id` for all others; None: it knows
        the target's tokens.
        """
        self._model = model
        self._window = prefill_window
        self._max_chunk = max_chunk
        self._num_shared = num_shared
        self._other_id = other_id
        self.vocabulary: Tensor | None = None
        self.hidden_size: int = model.config.hidden_size
        self.hidden_layers: tuple[int, ...] | None = None
        self.reads_history = False
        self.at_once = None
        # whole pieces
        self.num_staging_rows = prefill_window * (1 - -max_chunk // prefill_window) - 1
        self.cache = DraftCache(model.cache, num_full_rows, model.model.model.rotary_emb.inv_freq)

    def prefill(self, slot: int, text: Tensor, hidden: Tensor) -> None:
        """Run a chunk at its original positions, and store its rows in the full cache.

        It is cut into pieces as long as the window, the sequences of a batch, so that no kernel
        needs a mask: a token sees its own piece, and a window before it. What pads the last one is
        read by nobody.
        """
        token_ids = text[HISTORY:]
        num_new = len(token_ids)
        held = self.cache.of[slot]
        position = held.length
        assert num_new <= self._max_chunk
        kept = min(position, self._window - 1)
        size = min(num_new, self._window)
        padded = -(-num_new // size) * size
        ends = range(kept + size, kept + padded + 1, size)
        lengths = [min(end, size + self._window - 1) for end in ends]
        starts = [
            held.working.start + end - length for end, length in zip(ends, lengths, strict=True)
        ]
        positions = torch.arange(position, position + padded, device=token_ids.device)
        pieces = pad(token_ids, (0, padded - num_new)).view(-1, size)
        plan = AttentionPlan(starts, lengths, size, ends_only=True)
        self.forward(pieces, hidden, positions.view(-1, size), plan, None)
        self.cache.store_working(slot, kept, num_new, position)
        keep_next = min(position + num_new, self._window - 1)
        self.cache.keep_last(slot, kept + num_new - keep_next, keep_next)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        history: Tensor | None,
    ) -> Tensor:
        """Run token_ids [B, T] at positions [B, T] and return hidden [B, T, C]."""
        if self._num_shared is not None:
            token_ids = token_ids.where(token_ids < self._num_shared, self._other_id)
        return self._model.forward(token_ids, positions, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        return self._model.logits(hidden)[..., : self._num_shared]
