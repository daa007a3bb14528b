"""What a draft's training is given, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specextend.attention.hf import IMPLEMENTATION
from specextend.config import RunConfig
from specextend.models import load_target, load_tokenizer, tokens_sha256
from specextend.training.corpus import Corpus
from specextend.training.fit import Say
from specextend.training.options import TrainOptions


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen parts of a target that a draft is trained against."""

    name: str
    tokens_sha256: str
    """`models.tokens_sha256` of its tokenizer."""
    config: Any
    """transformers' configuration"""
    embedding: Tensor
    """[tokens, C]"""
    lm_head: Tensor
    """[tokens, C]"""
    final_norm: Tensor
    """[C]"""

    @property
    def device(self) -> torch.device:
        """Where drafts are trained."""
        return self.lm_head.device

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        size: int | None = getattr(self.config, "head_dim", None)
        return size or self.config.hidden_size // self.config.num_attention_heads


@dataclass(frozen=True, slots=True)
class Task:
    """A training whose recordings are made."""

    corpus: Corpus
    target: Target
    vocabulary: Tensor | None
    """[V] int64 token ids that the draft is to propose; None: what the head to start from proposes."""
    learned: list[Path]
    """Recordings to learn from."""
    held: list[Path]
    """Recordings to judge the draft by."""
    output: Path
    say: Say

    @property
    def options(self) -> TrainOptions:
        """What the user has set."""
        return self.corpus.options

    @property
    def work(self) -> Path:
        """Folder of what is needed to go on."""
        return self.output / "work"

    def groups(self) -> list[str]:
        """What each part of a recording is, the prompt first."""
        sample, summary = self.options.sample, self.options.summary
        facts = ["facts"] if sample.num_facts else []
        return ["text", *["quotes"] * sample.num_quotes, *facts, *["summaries"] * summary.count]


def load_frozen(config: RunConfig) -> Target:
    """The configuration's target, all but its layers."""
    model: Any = load_target(config.target, IMPLEMENTATION)
    return Target(
        Path(config.target.model).name,
        tokens_sha256(load_tokenizer(config.target.model, config.target.revision)),
        model.config,
        model.get_input_embeddings().weight.detach().clone(),
        model.get_output_embeddings().weight.detach().clone(),
        model.model.norm.weight.detach().clone(),
    )
