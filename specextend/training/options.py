"""What a user can set of a training. Frozen, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from specextend.training.fit import FitOptions
from specextend.training.language_model import LanguageModelOptions
from specextend.training.recording import SummaryOptions
from specextend.training.samples import SampleOptions

TrainedKind = Literal["eagle", "eagle3", "model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """A whole training."""

    kind: TrainedKind = "eagle"
    """`eagle`: a head over the target's last hidden state, in our format; `eagle3`: one over three layers, in the
    published EAGLE-3 layout; `model`: a small standalone LM."""
    start_from: str | None = None
    """Folder of a head to go on from; it keeps its shape and vocabulary, and gains copy heads where it has none."""
    num_samples: int = 96
    """Prompts that the target is run over."""
    vocabulary: int = 8192
    """Tokens that the draft can propose: the most frequent ones of the text, and all special ones."""
    copy_heads: int = 2
    """`eagle`: KV heads that look tokens up far above; 0 for none."""
    text_passes: int = 1
    """`model`: times it reads the text itself before it learns from the target."""
    sample: SampleOptions = field(default_factory=SampleOptions)
    summary: SummaryOptions = field(default_factory=SummaryOptions)
    fit: FitOptions = field(default_factory=FitOptions)
    language_model: LanguageModelOptions = field(default_factory=LanguageModelOptions)

    def __post_init__(self) -> None:
        if self.kind not in get_args(TrainedKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(TrainedKind))}, got {self.kind!r}")
        if self.kind != "eagle" and self.start_from is not None:
            raise ValueError("start_from goes with kind eagle only: the other kinds begin anew")
        for name, least in (("num_samples", 2), ("vocabulary", 16), ("copy_heads", 0), ("text_passes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
