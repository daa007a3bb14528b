"""From replays to figures: acceptance of whole documents, of needle tokens and of the rest, and divergence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specextend.bench.recording import Recording
from specextend.bench.replay import Replay, ReplayedStep
from specextend.bench.study_documents import StudyDocument
from specextend.bench.study_drafts import CacheChoice
from specextend.report.spread import spread
from specextend.stats import ratio

NEEDLE, REST = "needle", "rest"


@dataclass(frozen=True, slots=True)
class Category:
    """Of one document, the known tokens of one category that are the target's own choice."""

    tokens: int
    accepted: float | None
    """Share of them that came from a tree."""
    acceptance_length: float | None
    """Tokens of a step that starts with one of them."""
    agreement: float | None
    """Share of such steps whose likeliest first node is right."""
    visible: float | None
    """Share of them whose source the draft could see; 0 for the rest, which have none."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One document with one draft and one cache."""

    document: StudyDocument
    draft: str
    choice: CacheChoice
    acceptance_length: float | None
    """Tokens of a step, those without a tree counted."""
    agreement: float | None
    divergence: float | None
    kl: float | None
    coverage: float | None
    categories: dict[str, Category] = field(default_factory=dict)


def measure(document: StudyDocument, recording: Recording, draft: str, choice: CacheChoice, replay: Replay) -> Replayed:
    """The figures of one replay."""
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
        categories={} if document.sources is None else _categories(document.sources, recording, replay),
    )


def cells(replayed: Iterable[Replayed]) -> list[dict[str, Any]]:
    """Replays of one draft, cache, kind and length together, as JSON values."""
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
        **{name: _spread(getattr(each, name) for each in group) for name in names},
        "categories": {
            name: _category([each.categories[name] for each in group if name in each.categories])
            for name in first.categories
        },
    }


def _category(group: Sequence[Category]) -> dict[str, Any]:
    names = ("accepted", "acceptance_length", "agreement", "visible")
    return {
        "tokens": sum(each.tokens for each in group),
        **{name: _spread(getattr(each, name) for each in group) for name in names},
    }


def _categories(sources: Sequence[int | None], recording: Recording, replay: Replay) -> dict[str, Category]:
    """Of an answer. The first token is the prefill's, so it is in none; nor is one that the target would not say."""
    own = [known == choice for known, choice in zip(recording.known_token_ids, recording.choice_token_ids, strict=True)]
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
    """The known tokens whose source was visible in the step that decided them."""
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


def _spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    measured = spread(values)
    return None if measured is None else asdict(measured)
