"""The drafts of a retrieval study, and the caches through which they see the document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from torch import Tensor

from specextend.bench.sides import in_mode
from specextend.config import RunConfig
from specextend.decoding.decoding_options import CacheOptions, Policy
from specextend.decoding.drafter import Drafter
from specextend.decoding.model import CachedModel
from specextend.decoding.retrieval import scored_layers
from specextend.drafters.draft_options import DraftOptions
from specextend.pairing import KINDS, load_drafter

_MERGED = "+ngram"


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """Cache options for a draft."""

    options: CacheOptions
    study: str | None = None
    """The option that differs from the configuration; None if only policy and size do."""

    @property
    def tokens(self) -> int | None:
        """Count the visible tokens; None: all."""
        return None if self.options.policy == "full" else self.options.top_k_chunks * self.options.chunk_size


def parse_draft(text: str) -> DraftOptions:
    """Parse `ngram`, `eagle:FOLDER` or `model:NAME`; the last two may end in `+ngram` to merge n-gram drafts.

    Raises ValueError for anything else.
    """
    if text == "ngram":
        return DraftOptions(kind="ngram")
    name, _, model = text.removesuffix(_MERGED).partition(":")
    kind = next((kind for kind in KINDS if kind == name), None)
    if kind is None or not model:
        raise ValueError(f"a draft must be ngram, eagle:FOLDER[{_MERGED}] or model:NAME[{_MERGED}], got {text!r}")
    return DraftOptions(kind=kind, model=model, ngram=text.endswith(_MERGED))


def draft_label(draft: DraftOptions) -> str:
    """Label a draft: its kind, or the last part of the model's name, with `+ngram` if it is merged."""
    return f"{Path(draft.model).name or draft.kind}{_MERGED if draft.ngram else ''}"


def default_drafts(config: RunConfig) -> tuple[DraftOptions, ...]:
    """List the configuration's draft alone, n-grams alone, and both merged; n-grams alone if it has no model."""
    ngrams = DraftOptions(kind="ngram")
    if config.draft is None or not config.draft.model:
        return (ngrams,)
    return (replace(config.draft, ngram=False), ngrams, replace(config.draft, ngram=True))


def label_drafts(drafts: Sequence[DraftOptions]) -> dict[str, DraftOptions]:
    """Map labels to drafts. Raises ValueError if two drafts have the same label."""
    labelled = {draft_label(draft): draft for draft in drafts}
    if len(labelled) < len(drafts):
        raise ValueError(
            f"two drafts have the same name, so their folders must be renamed: {', '.join(map(draft_label, drafts))}"
        )
    return labelled


def study_config(config: RunConfig, draft: DraftOptions) -> RunConfig:
    """Give the configuration another draft, one sequence at a time. Raises ValueError if they do not fit."""
    values = in_mode(config.model_copy(update={"draft": draft}), "specextend").model_dump(mode="json")
    return RunConfig.from_values(values)


def load_study_drafter(config: RunConfig, target: CachedModel, lm_head: Tensor, num_rows: int) -> Drafter:
    """Load a drafter with room for documents of `num_rows` tokens, all of which it may see."""
    everything = CacheOptions(policy="full")
    return load_drafter(config, everything, target, lm_head, num_rows)


def main_choices(cache: CacheOptions, policies: Sequence[str], cache_tokens: Sequence[int]) -> list[CacheChoice]:
    """List each policy with each number of visible tokens. Raises ValueError if one is impossible."""
    choices = []
    for policy in policies:
        if policy not in get_args(Policy):
            raise ValueError(f"a policy must be one of {', '.join(get_args(Policy))}, got {policy!r}")
        if policy == "full":
            choices.append(CacheChoice(replace(cache, policy="full")))
            continue
        own = replace(cache, policy=policy)  # type: ignore[arg-type]
        choices += [CacheChoice(with_budget(own, tokens)) for tokens in cache_tokens]
    return choices


def with_budget(cache: CacheOptions, tokens: int) -> CacheOptions:
    """Change the number of visible tokens. Raises ValueError unless it is a whole number of chunks."""
    if tokens % cache.chunk_size:
        raise ValueError(f"cache tokens must be a multiple of cache.chunk_size ({cache.chunk_size}), got {tokens}")
    return replace(cache, top_k_chunks=tokens // cache.chunk_size)


def study_choices(cache: CacheOptions, tokens: int, num_layers: int) -> list[CacheChoice]:
    """List policy `retrieval` as configured, and with one option changed at a time.

    The options are the layers that score the chunks, and the number of steps between retrievals.
    Raises ValueError if `tokens` is too small.
    """
    named = replace(cache, policy="retrieval")
    base = with_budget(replace(named, score_layers=scored_layers(named, num_layers)), tokens)
    last, middle = num_layers - 1, num_layers // 2
    several = tuple(dict.fromkeys((num_layers // 4, middle, 3 * num_layers // 4, last)))
    changed = {
        f"layer {last}": replace(base, score_layers=(last,)),
        f"layer {middle}": replace(base, score_layers=(middle,)),
        f"layers {', '.join(map(str, several))}": replace(base, score_layers=several),
        "refresh: every 4": replace(base, refresh_every=4),
        "refresh: every 1": replace(base, refresh_every=1),
    }
    changes = [CacheChoice(options, study) for study, options in changed.items() if options != base]
    return [CacheChoice(base, "as configured"), *changes]
