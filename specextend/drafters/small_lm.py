"""A small standalone causal LM as the draft.

Shapes: `L` layers, `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import DraftCache
from specextend.decoding.model import CachedModel
from specextend.model_files import VOCABULARY, ModelError, read_json, read_safetensors_header, read_token_ids


class ModelNetwork:
    """A stock transformers LM. It reads tokens only and ignores the target's hidden states."""

    def __init__(
        self,
        model: CachedModel,
        num_full_rows: int,
        prefill_window: int,
        max_chunk: int,
        reduced: ReducedVocabulary | None = None,
    ) -> None:
        """Take the model; without `reduced` its rows are those of the target."""
        self._model, self._window, self._max_chunk = model, prefill_window, max_chunk
        self.vocabulary = None if reduced is None else reduced.token_ids.to(model.device)
        self._rows = None if reduced is None else reduced.rows().to(model.device)
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
        plan = AttentionPlan([held.working.start], [kept + num_new], num_new, window=self._window)
        positions = torch.arange(position, position + num_new, device=token_ids.device)
        self._run(token_ids.unsqueeze(0), positions.unsqueeze(0), plan)
        self.cache.store_working(slot, kept, num_new, position)
        keep_next = min(position + num_new, self._window - 1)
        self.cache.keep_last(slot, kept + num_new - keep_next, keep_next)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, history: Tensor | None
    ) -> Tensor:
        """Run token_ids [B, T] at positions [B, T] and return hidden [B, T, C]."""
        return self._run(token_ids, positions, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        logits = self._model.logits(hidden)
        return logits if self.vocabulary is None else logits[..., : len(self.vocabulary)]

    def _run(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        return self._model.forward(token_ids if self._rows is None else self._rows[token_ids], positions, plan)


FILE = "draft_vocabulary.safetensors"


@dataclass(frozen=True, slots=True)
class ReducedVocabulary:
    """The part of the target's tokens that a model knows.

    Row r of the model's embedding and LM head is the token `token_ids[r]`. Rows behind them are never proposed.
    """

    token_ids: Tensor
    """[R] int64, ascending"""
    target_vocab_size: int
    """Rows of the target's embedding."""
    other_row: int
    """The model's row that is read for every other token of the target."""
    tokens_sha256: str | None = None
    """`models.tokens_sha256` of the target's tokenizer; None: not known, and not checked."""

    def rows(self) -> Tensor:
        """Return the model's row [target_vocab_size] int64 of each of the target's tokens."""
        rows = torch.full((self.target_vocab_size,), self.other_row)
        rows[self.token_ids] = torch.arange(len(self.token_ids))
        return rows


def shared_vocabulary(num_rows: int, target_vocab_size: int, other_row: int) -> ReducedVocabulary | None:
    """Return the ids that a model of `num_rows` rows has in common with its target; None if they have the same rows.

    Both count the same tokens from 0, and differ in how many rows follow: padding, or tokens that one of them lacks.
    """
    if num_rows == target_vocab_size:
        return None
    return ReducedVocabulary(torch.arange(min(num_rows, target_vocab_size)), target_vocab_size, other_row)


def read_reduced(folder: Path) -> ReducedVocabulary | None:
    """Read the reduced vocabulary of a model's folder and check it against the config; None if there is none.

    Beside a stock model's files, `draft_vocabulary.safetensors` holds `draft_token_ids` [R], ascending ids of the
    target; one more row of the model stands for all others. In `config.json`, `target_vocab_size` is the number of the
    target's tokens, and `tokens_sha256` their hash. No weight is loaded for the check. Raises ModelError in one line.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    header, config = read_safetensors_header(file), read_json(folder / "config.json")
    if set(header) != {VOCABULARY} or header[VOCABULARY].dtype != "I64" or len(header[VOCABULARY].shape) != 1:
        raise ModelError(f"{file} must hold one tensor, {VOCABULARY}, a list of int64")
    size, target_vocab_size = header[VOCABULARY].shape[0], config.get("target_vocab_size")
    if type(target_vocab_size) is not int or target_vocab_size < 1:
        raise ModelError(
            f"{folder / 'config.json'}: target_vocab_size must be a positive int, got {target_vocab_size!r}"
        )
    if config.get("vocab_size") != size + 1:
        raise ModelError(
            f"{folder / 'config.json'}: vocab_size is {config.get('vocab_size')!r}; {FILE} lists {size} tokens, "
            "and one more row stands for all others"
        )
    token_ids = read_token_ids(file, target_vocab_size)
    return ReducedVocabulary(token_ids, target_vocab_size, size, config.get("tokens_sha256"))
