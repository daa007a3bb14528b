"""Figures of replays and of the target's layers.

For replays: acceptance over whole documents, over needle tokens and over the rest, and divergence. For layers: how
often a fresh selection by one layer alone shows the source of the needle token that comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specextend.bench.replay import Replay, ReplayedStep
from specextend.bench.study_documents import StudyDocument
from specextend.bench.study_drafts import CacheChoice
from specextend.bench.trace import Trace
from specextend.decoding.decoding_options import CacheOptions
from specextend.decoding.retrieval import chunk_mass, select_by_score
from specextend.report.statistics import spread, spread_json
from specextend.stats import ratio

NEEDLE, REST = "needle", "rest"
MOST_LAYER_TOKENS = 16
"""Most needle tokens of a document that layers are tested on, evenly spread."""


@dataclass(frozen=True, slots=True)
class Category:
    """Figures of the known tokens of one category in one document that are the target's own choice."""

    tokens: int
    """Number of these tokens."""
    accepted: float | None
    """Share of the tokens that came from a tree."""
    acceptance_length: float | None
    """Mean tokens of the steps that start with one of them."""
    agreement: float | None
    """Share of those steps whose likeliest first node is right."""
    visible: float | None
    """Share of the tokens whose source the draft could see; 0 for the rest, which has no sources."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Figures of one document with one draft and one cache."""

    document: StudyDocument
    draft: str
    choice: CacheChoice
    acceptance_length: float | None
    """Mean tokens of a step, steps without a tree included."""
    agreement: float | None
    divergence: float | None
    kl: float | None
    coverage: float | None
    categories: dict[str, Category] = field(default_factory=dict)


def measure(document: StudyDocument, trace: Trace, draft: str, choice: CacheChoice, replay: Replay) -> Replayed:
    """Compute the figures of one replay."""
    steps, divergences = replay.steps, [step.divergence for step in replay.steps if step.divergence is not None]
    return Replayed(
        document,
        draft,
        choice,
        acceptance_length=_length(steps),
        agreement=ratio(sum(step.agrees for step in steps), len(steps)),
        divergence=ratio(sum(each.total_variation for each in divergences), len(divergences)),
        kl=ratio(sum(each.kl for each in divergences), len(divergences)),
        coverage=replay.stats.retrieval_coverage,
        categories={} if document.sources is None else _categories(document.sources, trace, replay),
    )


def cells(replayed: Iterable[Replayed]) -> list[dict[str, Any]]:
    """Group replays by draft, cache, kind and length, and return the figures of each group as JSON values."""
    groups: dict[tuple[Any, ...], list[Replayed]] = {}
    for each in replayed:
        where = (each.document.kind, each.document.document.bucket)
        groups.setdefault((each.draft, each.choice, *where), []).append(each)
    return [_cell(group) for group in groups.values()]


def _cell(group: Sequence[Replayed]) -> dict[str, Any]:
    first = group[0]
    study = {} if first.choice.study is None else {"study": first.choice.study}
    names = ("acceptance_length", "agreement", "divergence", "kl", "coverage")
    return {
        **study,
        "draft": first.draft,
        "policy": first.choice.options.policy,
        "cache_tokens": first.choice.tokens,
        "kind": first.document.kind,
        "length": first.document.document.bucket,
        "documents": len(group),
        **{name: spread_json(spread(getattr(each, name) for each in group)) for name in names},
        "categories": {
            name: _category([each.categories[name] for each in group if name in each.categories])
            for name in first.categories
        },
    }


def _category(group: Sequence[Category]) -> dict[str, Any]:
    names = ("accepted", "acceptance_length", "agreement", "visible")
    return {
        "tokens": sum(each.tokens for each in group),
        **{name: spread_json(spread(getattr(each, name) for each in group)) for name in names},
    }


def _categories(sources: Sequence[int | None], trace: Trace, replay: Replay) -> dict[str, Category]:
    """Split an answer into needle and rest, without its first token and those that the target would not choose."""
    own = [known == choice for known, choice in zip(trace.known_token_ids, trace.choice_token_ids, strict=True)]
    numbers: dict[str, list[int]] = {NEEDLE: [], REST: []}
    for number in range(1, len(sources)):
        if own[number]:
            numbers[NEEDLE if sources[number] is not None else REST].append(number)
    accepted = {step.first + i for step in replay.steps for i in range(step.num_accepted)}
    seen = _seen(sources, replay)
    return {name: _measure_category(own, accepted, seen, replay.steps) for name, own in numbers.items()}


def _measure_category(
    numbers: Sequence[int], accepted: set[int], seen: set[int], steps: Sequence[ReplayedStep]
) -> Category:
    starting = [step for step in steps if step.first in set(numbers)]
    return Category(
        tokens=len(numbers),
        accepted=ratio(sum(number in accepted for number in numbers), len(numbers)),
        acceptance_length=_length(starting),
        agreement=ratio(sum(step.agrees for step in starting), len(starting)),
        visible=ratio(sum(number in seen for number in numbers), len(numbers)),
    )


def _seen(sources: Sequence[int | None], replay: Replay) -> set[int]:
    """Collect the known tokens whose source was visible in the step that decided them."""
    seen: set[int] = set()
    for step in replay.steps:
        shown = next(positions for decided, positions in reversed(replay.selections) if decided < step.first)
        visible = set(shown.tolist())
        decided = range(step.first, min(step.first + step.num_accepted + 1, len(sources)))
        seen |= {number for number in decided if sources[number] in visible}
    return seen


def _length(steps: Sequence[ReplayedStep]) -> float | None:
    mean = ratio(sum(step.num_accepted for step in steps), len(steps))
    return None if mean is None else 1 + mean


@dataclass(frozen=True, slots=True)
class LayerView:
    """Figures of one document for one layer."""

    kind: str
    layer: int
    shown: float | None
    """Share of needle tokens whose source a selection by this layer right before them would show."""


def layer_views(document: StudyDocument, trace: Trace, options: CacheOptions, scale: float) -> list[LayerView]:
    """Test every recorded layer; none for a document without a known answer."""
    if document.sources is None:
        return []
    needle = [
        number
        for number, source in enumerate(document.sources)
        if source is not None and trace.known_token_ids[number] == trace.choice_token_ids[number]
    ]
    chosen = needle[:: -(-len(needle) // MOST_LAYER_TOKENS)] if needle else []
    return [
        LayerView(document.kind, layer, _shown(document.sources, chosen, trace, layer, options, scale))
        for layer in sorted(trace.keys)
    ]


def _shown(
    sources: Sequence[int | None],
    numbers: Sequence[int],
    trace: Trace,
    layer: int,
    options: CacheOptions,
    scale: float,
) -> float | None:
    """Compute the share of the known tokens `numbers` whose source a selection by `layer` alone shows."""
    shown = 0
    for number in numbers:
        num_tokens = trace.num_prompt_tokens + number
        query, keys = trace.queries[layer][number], trace.keys[layer][:, :num_tokens]
        mass = chunk_mass(query, keys, options.chunk_size, scale).cpu()
        selection = select_by_score(mass, num_tokens, options)
        shown += sources[number] in selection.positions(num_tokens, options.chunk_size).tolist()
    return ratio(shown, len(numbers))


def layer_cells(views: Iterable[LayerView]) -> list[dict[str, Any]]:
    """Group the documents of one kind, whatever their length, and return the figures of each layer as JSON values."""
    groups: dict[tuple[str, int], list[float | None]] = {}
    for view in views:
        groups.setdefault((view.kind, view.layer), []).append(view.shown)
    return [
        # older results hold the maximum over heads, too
        {"kind": kind, "heads": "mean", "layer": layer, "shown": spread_json(spread(shown))}
        for (kind, layer), shown in groups.items()
    ]
