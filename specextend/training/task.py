"""A training's settings, the frozen parts of its target, and what a draft of any kind is trained from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from specextend.config import RunConfig
from specextend.training.fit import Say

TrainedKind = Literal["eagle", "model"]
HEAD_DIM = 64
NUM_KV_HEADS = 2
"""Shape of a standalone LM beside its options."""
MIN_QUOTE, MAX_QUOTE = 32, 96
"""Tokens of a quote in a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Settings of a whole training. Lengths are in tokens."""

    kind: TrainedKind = "eagle"
    """`eagle`: a head over the target's last hidden state, in our format; `model`: a small standalone LM."""
    num_samples: int = 96
    """Number of prompts that the target reads."""
    min_tokens: int = 1024
    """Shortest piece of a document in a sample."""
    max_tokens: int = 5120
    """Longest piece of a document in a sample."""
    summary_tokens: int = 112
    """Most tokens of a summary by the target."""
    vocabulary: int = 8192
    """Number of tokens that the draft can propose: all special tokens and the most frequent tokens of the text."""
    copy_heads: int = 2
    """`eagle`: number of KV heads that look up earlier occurrences of the last tokens."""
    hidden_size: int = 384
    """`model`: hidden size."""
    num_layers: int = 2
    """`model`: number of layers."""
    passes: int = 8
    """Number of passes over the recordings."""
    learning_rate: float = 4e-4
    """Peak learning rate."""
    seed: int = 0
    """Seed of samples and training."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(TrainedKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(TrainedKind))}, got {self.kind!r}")
        least = {"num_samples": 2, "vocabulary": 16, "copy_heads": 0, "summary_tokens": 1, "passes": 1, "num_layers": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if not 2 * MAX_QUOTE <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be from {2 * MAX_QUOTE} to max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.hidden_size < 1 or self.hidden_size % (HEAD_DIM * NUM_KV_HEADS):
            raise ValueError(f"hidden_size must be a multiple of {HEAD_DIM * NUM_KV_HEADS}, got {self.hidden_size}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen parts of a target that a draft is trained against."""

    name: str
    tokens_sha256: str
    """Hash of its tokenizer, from `models.tokens_sha256`."""
    config: Any
    """Configuration of transformers."""
    embedding: Tensor
    """[tokens, C]"""
    lm_head: Tensor
    """[tokens, C]"""
    final_norm: Tensor
    """[C]"""

    @property
    def device(self) -> torch.device:
        """Return the device on which drafts are trained."""
        return self.lm_head.device


def frozen_parts(config: RunConfig, model: Any, tokens: str) -> Target:
    """Copy the parts of the configuration's target that lie outside its layers. tokens: its `tokens_sha256`."""
    return Target(
        Path(config.target.model).name,
        tokens,
        model.config,
        model.get_input_embeddings().weight.detach().clone(),
        model.get_output_embeddings().weight.detach().clone(),
        model.model.norm.weight.detach().clone(),
    )


@dataclass(frozen=True, slots=True)
class Task:
    """A training whose recordings exist."""

    options: TrainOptions
    target: Target
    vocabulary: Tensor
    """[V] int64 token ids that the draft proposes, ascending."""
    texts: list[Tensor]
    """Tokens [T] of every text that is not held out."""
    learned: list[Path]
    """Recordings to learn from."""
    held: list[Path]
    """Recordings to evaluate the draft on."""
    output: Path
    say: Say

    @property
    def work(self) -> Path:
        """Return the folder that holds what a resumed training needs."""
        return self.output / "work"
