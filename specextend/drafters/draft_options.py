"""The options of the draft: `draft.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DraftKind = Literal["eagle", "model", "self", "ngram"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """`draft.*`: The draft, which proposes the tree. It runs in the target's dtype and on the target's device.

    The section may be left out with `decoding.mode: autoregressive`.
    """

    kind: DraftKind
    """`eagle` is a head over the target's hidden states; `model` is a small causal LM with the target's tokens, of
    which either may lack some, or with any part of them if `specextend train` made it; `self` is
    the target itself with a part of its own cache in view; `ngram` proposes what followed the same tokens earlier in
    prompt or output. The last two need no model."""
    model: str = ""
    """For `eagle` a local folder, in this project's format or a published one (detected automatically); for `model` a
    name as in `target.model`; empty for `self` and `ngram`."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub; if unset, the default branch. A run keeps the commit that it began
    with."""
    ngram: bool = False
    """Merge n-gram drafts into the trees of another draft where they are likelier to be accepted than the draft's own
    nodes."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(DraftKind):
            raise ValueError(f"draft.kind must be one of {', '.join(get_args(DraftKind))}, got {self.kind!r}")
        if "://" in self.model:  # not repeated: an address may hold a token
            raise ValueError("draft.model must be a Hub id or a local path, not an address")
        if self.kind in ("self", "ngram"):
            self._check_no_model()
        elif not self.model:
            raise ValueError(f"draft.model must not be empty with draft.kind {self.kind}")
        if self.kind == "eagle" and self.revision is not None:
            raise ValueError("draft.revision must not be set with draft.kind eagle, whose model is a local folder")

    @property
    def has_ngrams(self) -> bool:
        """Return True if n-gram drafts are proposed, alone or merged."""
        return self.kind == "ngram" or self.ngram

    def _check_no_model(self) -> None:
        empty = {"model": "'\"\"'", "revision": "null"} | ({"ngram": "false"} if self.kind == "ngram" else {})
        if given := [name for name in empty if getattr(self, name)]:
            settings = " ".join(f"--set draft.{name}={empty[name]}" for name in given)
            names = " and ".join(f"draft.{name}" for name in given)
            raise ValueError(
                f"{names} must not be set with draft.kind {self.kind}, which has no model: leave out, or {settings}"
            )
