"""The drafts of a retrieval study, and what each may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from torch import Tensor

from specextend.bench.sides import in_mode
from specextend.config import RunConfig
from specextend.decoding.drafter import Drafter
from specextend.decoding.model import CachedModel
from specextend.decoding.options import CacheOptions, Policy
from specextend.decoding.retrieval import scored_layers
from specextend.drafters.options import DraftOptions
from specextend.loading import load_drafter

_MERGED = "+ngram"


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """One way to choose what the draft sees."""

    options: CacheOptions
    study: str | None = None
    """What is unlike the configuration; None for a policy and a size alone."""

    @property
    def tokens(self) -> int | None:
        """Visible tokens of the budget; None: all."""
        return None if self.options.policy == "full" else self.options.top_k_chunks * self.options.chunk_size


def parse_draft(text: str) -> DraftOptions:
    """`ngram`, `eagle:FOLDER` or `model:NAME`, the last two also with `+ngram` behind: merged with copies.

    Raises ValueError in one line.
    """
    if text == "ngram":
        return DraftOptions(kind="ngram")
    kind, colon, model = text.removesuffix(_MERGED).partition(":")
    if not colon or not model or kind not in ("eagle", "model"):
        raise ValueError(f"a draft is ngram, eagle:FOLDER or model:NAME, with {_MERGED} behind or not; got {text!r}")
    return DraftOptions(kind="eagle" if kind == "eagle" else "model", model=model, ngram=text.endswith(_MERGED))


def draft_label(draft: DraftOptions) -> str:
    """`ngram`, or the last part of the model's name, `+ngram` behind it where merged."""
    return f"{Path(draft.model).name}{_MERGED if draft.ngram else ''}" if draft.model else "ngram"


def default_drafts(config: RunConfig) -> tuple[DraftOptions, ...]:
    """The configuration's draft alone, copies alone, and both."""
    copies = DraftOptions(kind="ngram")
    if config.draft is None or config.draft.kind == "ngram":
        return (copies,)
    return (replace(config.draft, ngram=False), copies, replace(config.draft, ngram=True))


def label_drafts(drafts: Sequence[DraftOptions]) -> dict[str, DraftOptions]:
    """Label -> draft. Raises ValueError for two of one label."""
    labelled = {draft_label(draft): draft for draft in drafts}
    if len(labelled) < len(drafts):
        raise ValueError(f"two drafts have one name; their folders must differ: {', '.join(map(draft_label, drafts))}")
    return labelled


def study_config(config: RunConfig, draft: DraftOptions) -> RunConfig:
    """The configuration with another draft, one sequence at a time. Raises ValueError where they do not fit."""
    values = in_mode(config.model_copy(update={"draft": draft}), "specextend").model_dump(mode="json")
    return RunConfig.from_values(values)


def load_study_drafter(config: RunConfig, target: CachedModel, lm_head: Tensor, num_rows: int) -> Drafter:
    """A drafter with room for documents of `num_rows` tokens, all of which it may be shown."""
    everything = CacheOptions(policy="full", draft_prefill_window=config.cache.draft_prefill_window)
    return load_drafter(config, everything, target, lm_head, num_rows)


def main_choices(cache: CacheOptions, policies: Sequence[str], cache_tokens: Sequence[int]) -> list[CacheChoice]:
    """Each policy with each budget of tokens. Raises ValueError for one that cannot be."""
    choices = []
    for policy in policies:
        if policy not in get_args(Policy):
            raise ValueError(f"a policy is one of {', '.join(get_args(Policy))}, got {policy!r}")
        if policy == "full":
            choices.append(CacheChoice(replace(cache, policy="full")))
            continue
        own = replace(cache, policy=policy)  # type: ignore[arg-type]
        choices += [CacheChoice(with_budget(own, tokens)) for tokens in cache_tokens]
    return choices


def with_budget(cache: CacheOptions, tokens: int) -> CacheOptions:
    """The options with another number of visible tokens. Raises ValueError for one that is no number of chunks."""
    if tokens % cache.chunk_size:
        raise ValueError(f"{tokens} cache tokens are no multiple of cache.chunk_size ({cache.chunk_size})")
    return replace(cache, top_k_chunks=tokens // cache.chunk_size)


def study_choices(cache: CacheOptions, tokens: int, num_layers: int) -> list[CacheChoice]:
    """`retrieval` as configured, and with one thing changed at a time. Raises ValueError where the budget is too small.

    Which layers are trusted, how heads are aggregated, where chunks end, and how often the target is asked.
    """
    named = replace(cache, policy="retrieval")
    base = with_budget(replace(named, score_layers=scored_layers(named, num_layers)), tokens)
    last, middle = num_layers - 1, num_layers // 2
    several = tuple(dict.fromkeys((num_layers // 4, middle, 3 * num_layers // 4, last)))
    changed = {
        f"layer {last}": replace(base, score_layers=(last,)),
        f"layer {middle}": replace(base, score_layers=(middle,)),
        f"layers {', '.join(map(str, several))}": replace(base, score_layers=several),
        "heads: max": replace(base, score_heads="max"),
        "chunks: sentence": replace(base, chunk_boundaries="sentence"),
        "refresh: every 4": replace(base, refresh="every", refresh_every=4),
        "refresh: every 1": replace(base, refresh="every", refresh_every=1),
    }
    changes = [CacheChoice(options, study) for study, options in changed.items() if options != base]
    return [CacheChoice(base, "as configured"), *changes]
