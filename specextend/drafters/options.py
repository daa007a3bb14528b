"""What a user can set of the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DraftKind = Literal["eagle", "model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """`draft.*`: what proposes the tree. It runs in the target's dtype, on the target's device."""

    kind: DraftKind
    """`eagle`: a head over the target's hidden states; `model`: a small causal LM with the target's vocabulary."""
    model: str
    """`eagle`: a local folder in our format (`eagle_config.py`); `model`: as `target.model`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; none is the repository's default branch."""

    def __post_init__(self) -> None:
        if self.kind not in ("eagle", "model"):
            raise ValueError(f"draft.kind must be one of eagle, model, got {self.kind!r}")
        if not self.model:
            raise ValueError("draft.model must not be empty")
        if self.kind == "eagle" and self.revision is not None:
            raise ValueError("draft.revision must not be set with draft.kind eagle, whose model is a local folder")
