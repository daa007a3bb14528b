"""The options of the draft: `draft.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DraftKind = Literal["eagle", "model", "ngram"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """`draft.*`: The draft, which proposes the tree. It runs in the target's dtype and on the target's device.

    The section may be left out with `decoding.mode: autoregressive`.
    """

    kind: DraftKind
    """`eagle` is a head over the target's hidden states; `model` is a small causal LM with the target's vocabulary, or
    with a part of it if `jobs/train_draft.py` made it; `ngram` needs no model and proposes what followed the same
    tokens earlier in prompt or output."""
    model: str = ""
    """For `eagle` a local folder, in this project's format or a published one (detected automatically); for `model` a
    name as in `target.model`; empty for `ngram`."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub; if unset, the default branch. A run keeps the commit that it began
    with."""
    ngram: bool = False
    """Merge n-gram drafts into the trees of an `eagle` or `model` draft where they are likelier to be accepted than the
    draft's own nodes."""

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
    def has_ngrams(self) -> bool:
        """Return True if n-gram drafts are proposed, alone or merged."""
        return self.kind == "ngram" or self.ngram

    def _check_ngram(self) -> None:
        given = {"model": bool(self.model), "revision": self.revision is not None, "ngram": self.ngram}
        if names := [f"draft.{name}" for name, is_given in given.items() if is_given]:
            raise ValueError(f"{names[0]} must not be set with draft.kind ngram, which has no model")
