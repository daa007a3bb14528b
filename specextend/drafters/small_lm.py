"""A small standalone causal LM as the draft.

Shapes: `L` layers, `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import DraftCache
from specextend.decoding.model import CachedModel


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

        It proposes the ids below `num_shared`, and reads `other_id` for all others; None: it knows the target's tokens.
        """
        self._model, self._window, self._max_chunk = model, prefill_window, max_chunk
        self._num_shared, self._other_id = num_shared, other_id
        self.vocabulary: Tensor | None = None
        self.hidden_size: int = model.config.hidden_size
        self.hidden_layers: tuple[int, ...] = ()
        self.reads_history = False
        self.num_staging_rows = prefill_window - 1 + max_chunk
        self.cache = DraftCache(model.cache, num_full_rows, model.model.model.rotary_emb.inv_freq)

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Run a chunk at its original positions with sliding-window attention, and store its rows in the full cache."""
        num_new, held = len(token_ids), self.cache.of[slot]
        position = held.length
        assert num_new <= self._max_chunk
        kept = min(position, self._window - 1)
        device = token_ids.device
        plan = AttentionPlan([held.working.start], [kept + num_new], num_new, window=self._window, device=device)
        positions = torch.arange(position, position + num_new, device=device)
        self._run(token_ids.unsqueeze(0), positions.unsqueeze(0), plan)
        self.cache.store_working(slot, kept, num_new, position)
        keep_next = min(position + num_new, self._window - 1)
        self.cache.keep_last(slot, kept + num_new - keep_next, keep_next)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, history: Tensor | None
    ) -> Tensor:
        """Run token_ids [B, T] at positions [B, T] and return hidden [B, T, C]."""
        return self._run(token_ids, positions, plan)

    def grow(self, *roots: Tensor, **sizes: float) -> None:
        """Grow nothing: trees grow level by level."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        return self._model.logits(hidden)[..., : self._num_shared]

    def _run(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        if self._num_shared is not None:
            token_ids = token_ids.where(token_ids < self._num_shared, self._other_id)
        return self._model.forward(token_ids, positions, plan)
