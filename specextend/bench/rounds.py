"""Measuring fairly: every side decodes every document, in an order that turns from document to document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specextend.bench.documents import BenchDocument
from specextend.bench.measurement import Measurement, Side

WARM_UP_TOKENS = 16

Say = Callable[[str], None]
"""Takes one line of progress."""


@dataclass(frozen=True, slots=True)
class Record:
    """One document on every side."""

    document: BenchDocument
    measurements: dict[str, Measurement]


def run_rounds(
    sides: Mapping[str, Side], documents: Sequence[BenchDocument], max_new_tokens: int, say: Say
) -> Iterator[Record]:
    """Warm every side up on the shortest document, then measure.

    Sides take turns at each document and in going first, so that a machine that slows down slows all of them.
    """
    shortest = min(documents, key=lambda document: len(document.prompt_token_ids))
    for name, side in sides.items():
        say(f"warming up {name}")
        side.run(shortest.prompt_token_ids, min(WARM_UP_TOKENS, max_new_tokens))
    for index, document in enumerate(documents):
        measurements = {
            name: sides[name].run(document.prompt_token_ids, max_new_tokens) for name in _turned([*sides], index)
        }
        say(f"{index + 1}/{len(documents)} {document.doc_id}: {_speeds(measurements)}")
        yield Record(document, {name: measurements[name] for name in sides})


def _turned(names: list[str], index: int) -> list[str]:
    first = index % len(names)
    return names[first:] + names[:first]


def _speeds(measurements: Mapping[str, Measurement]) -> str:
    return ", ".join(
        f"{name} {measured.decode_tokens_per_s or 0:.1f}" for name, measured in sorted(measurements.items())
    )
