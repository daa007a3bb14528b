"""A small standalone causal LM as the draft.

Shapes: `L` layers, `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.draft_cache import DraftCache
from specextend.decoding.model import CachedModel
from specextend.drafters.reduced import ReducedVocabulary


class ModelNetwork:
    """A stock transformers LM. It reads tokens only; the target's hidden states are ignored."""

    def __init__(
        self,
        model: CachedModel,
        num_full_rows: int,
        prefill_window: int,
        max_chunk: int,
        reduced: ReducedVocabulary | None = None,
    ) -> None:
        """`reduced` None: the model knows all of the target's tokens."""
        self._model, self._window, self._max_chunk = model, prefill_window, max_chunk
        self.vocabulary = None if reduced is None else reduced.token_ids.to(model.device)
        self._rows = None if reduced is None else reduced.rows().to(model.device)
        self.hidden_layers: tuple[int, ...] = ()
        self.reads_history = False
        self.cache = DraftCache(model.cache, num_full_rows, model.model.model.rotary_emb.inv_freq)

    def num_staging_rows(self) -> int:
        """Prefill keeps a window and a chunk in the working cache."""
        return self._window - 1 + self._max_chunk

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Run a chunk at its original positions with sliding-window attention, and file its rows away."""
        num_new, position = len(token_ids), self.cache.length(row)
        assert num_new <= self._max_chunk
        kept = min(position, self._window - 1)
        plan = AttentionPlan([self.cache.start(row)], [kept + num_new], num_new, window=self._window)
        positions = torch.arange(position, position + num_new, device=token_ids.device)
        self._run(token_ids.unsqueeze(0), positions.unsqueeze(0), plan)
        self.cache.store_working(row, kept, num_new, position)
        keep_next = min(position + num_new, self._window - 1)
        self.cache.keep_last(row, kept + num_new - keep_next, keep_next)

    def release(self, row: int) -> None:
        """All that belongs to a row is in the cache."""

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, history: Tensor | None
    ) -> Tensor:
        """Hidden [B, T, C] of token_ids [B, T] at slot positions [B, T]."""
        return self._run(token_ids, positions, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden [..., C]."""
        logits = self._model.logits(hidden)
        return logits if self.vocabulary is None else logits[..., :-1]

    def _run(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        return self._model.forward(token_ids if self._rows is None else self._rows[token_ids], positions, plan)
