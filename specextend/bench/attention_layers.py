"""Which of the target's layers look at what is to be said next: would a fresh selection by one show the needle?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from specextend.bench.recording import Recording
from specextend.bench.study_documents import StudyDocument
from specextend.decoding.chunks import Chunks
from specextend.decoding.options import CacheOptions, ScoreHeads
from specextend.decoding.retrieval import chunk_mass, select_by_score
from specextend.report.spread import spread
from specextend.stats import ratio

_MOST_TOKENS = 16
"""Needle tokens looked at in a document, evenly spread."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """One document as one layer sees it."""

    kind: str
    heads: ScoreHeads
    layer: int
    shown: float | None
    """Share of needle tokens whose source is shown by a selection that this layer makes right before them."""


def layer_views(document: StudyDocument, recording: Recording, options: CacheOptions, scale: float) -> list[LayerView]:
    """Every recorded layer under every way to join heads. Documents without a known answer have none."""
    if document.sources is None:
        return []
    needle = [
        number
        for number, source in enumerate(document.sources)
        if source is not None and recording.known_token_ids[number] == recording.choice_token_ids[number]
    ]
    looked_at = needle[:: -(-len(needle) // _MOST_TOKENS)] if needle else []
    return [
        LayerView(document.kind, heads, layer, _shown(document.sources, looked_at, recording, layer, own, scale))
        for heads in get_args(ScoreHeads)
        for own in [replace(options, score_heads=heads)]
        for layer in sorted(recording.keys)
    ]


def _shown(
    sources: Sequence[int | None],
    numbers: Sequence[int],
    recording: Recording,
    layer: int,
    options: CacheOptions,
    scale: float,
) -> float | None:
    """Of the known tokens `numbers`, the share whose source a selection by `layer` alone shows."""
    chunks, shown = Chunks(options.chunk_size), 0
    for number in numbers:
        num_tokens = recording.num_prompt_tokens + number
        query, keys = recording.queries[layer][number], recording.keys[layer][:num_tokens]
        mass = chunk_mass(query, keys, chunks, scale, options.score_heads).cpu()
        edges = chunks.edges(num_tokens)
        shown += sources[number] in select_by_score(mass, edges, options).positions(edges).tolist()
    return ratio(shown, len(numbers))


def layer_cells(views: Iterable[LayerView]) -> list[dict[str, Any]]:
    """Documents of one kind together, whatever their length, as JSON values."""
    groups: dict[tuple[str, ScoreHeads, int], list[float | None]] = {}
    for view in views:
        groups.setdefault((view.kind, view.heads, view.layer), []).append(view.shown)
    found = []
    for (kind, heads, layer), shown in groups.items():
        measured = spread(shown)
        found.append(
            {
                "kind": kind,
                "heads": heads,
                "layer": layer,
                "shown": None if measured is None else asdict(measured),
            }
        )
    return found
