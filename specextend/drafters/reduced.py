"""The reduced vocabulary of a standalone LM: a stock model's folder with one more file, checked without loading it.

`draft_vocabulary.safetensors` holds `draft_token_ids` [R], ascending ids of the target. Row r of the model's embedding
and LM head is the token draft_token_ids[r]; the one row behind them stands for every other token and is never
proposed. `config.json` says under `target_vocab_size` how many tokens the target has, and under `tokens_sha256` which.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specextend.checkpoint import read_json, read_safetensors_header
from specextend.drafters.eagle_config import VOCABULARY, read_token_ids

FILE = "draft_vocabulary.safetensors"


@dataclass(frozen=True, slots=True)
class ReducedVocabulary:
    """Which of the target's tokens a model knows."""

    token_ids: Tensor
    """[R] int64, ascending"""
    target_vocab_size: int
    """Rows of the target's embedding."""
    tokens_sha256: str | None = None
    """`models.tokens_sha256` of the target's tokenizer; None: not known, and not checked."""

    def rows(self) -> Tensor:
        """[target_vocab_size] int64: the model's row of each of the target's tokens; R for those it does not know."""
        rows = torch.full((self.target_vocab_size,), len(self.token_ids))
        rows[self.token_ids] = torch.arange(len(self.token_ids))
        return rows


def read_reduced(folder: Path) -> ReducedVocabulary | None:
    """The reduced vocabulary of a model's folder, checked against its config; None where it has the file not.

    Raises ValueError in one line.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    header, config = read_safetensors_header(file), read_json(folder / "config.json")
    if set(header) != {VOCABULARY} or header[VOCABULARY].dtype != "I64" or len(header[VOCABULARY].shape) != 1:
        raise ValueError(f"{file} must hold one tensor, {VOCABULARY}, a list of int64")
    size, target_vocab_size = header[VOCABULARY].shape[0], config.get("target_vocab_size")
    if type(target_vocab_size) is not int or target_vocab_size < 1:
        raise ValueError(
            f"{folder / 'config.json'}: target_vocab_size must be a positive int, got {target_vocab_size!r}"
        )
    if config.get("vocab_size") != size + 1:
        raise ValueError(
            f"{folder / 'config.json'}: vocab_size is {config.get('vocab_size')!r}; {FILE} lists {size} tokens, "
            "and one more row stands for all others"
        )
    return ReducedVocabulary(read_token_ids(file, target_vocab_size), target_vocab_size, config.get("tokens_sha256"))
