"""What a user can set of the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DraftKind = Literal["eagle", "model", "ngram"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """`draft.*`: what proposes the tree. It runs in the target's dtype, on the target's device."""

    kind: DraftKind
    """`eagle`: a head over the target's hidden states; `model`: a small causal LM with the target's vocabulary;
    `ngram`: no model, but what the prompt and the output have said before."""
    model: str = ""
    """`eagle`: a local folder in our format (`eagle_config.py`) or a published one (`formats.py`); `model`: as
    `target.model`; `ngram`: none."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; none is the repository's default branch."""
    ngram: bool = False
    """Merge copies into the tree of an `eagle` or `model` draft, as many as are worth more than its own nodes."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(DraftKind):
            raise ValueError(f"draft.kind must be one of {', '.join(get_args(DraftKind))}, got {self.kind!r}")
        if self.kind == "ngram":
            self._check_ngram()
        elif not self.model:
            raise ValueError(f"draft.model must not be empty with draft.kind {self.kind}")
        if self.kind == "eagle" and self.revision is not None:
            raise ValueError("draft.revision must not be set with draft.kind eagle, whose model is a local folder")

    @property
    def copies(self) -> bool:
        """Whether copied text is proposed, alone or merged."""
        return self.kind == "ngram" or self.ngram

    def _check_ngram(self) -> None:
        given = {"model": bool(self.model), "revision": self.revision is not None, "ngram": self.ngram}
        if names := [f"draft.{name}" for name, is_given in given.items() if is_given]:
            raise ValueError(f"{names[0]} must not be set with draft.kind ngram, which has no model")
