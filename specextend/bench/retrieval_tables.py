"""The figures of `retrieval` as tables: a line for each draft and cache, a column for each length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specextend.report.buckets import bucket_name
from specextend.report.tables import Section, number

LENGTHS = "prompt, tokens up to"
Cell = dict[str, Any]


def retrieval_tables(result: dict[str, Any]) -> list[Section]:
    """Acceptance by length for each kind of document; what is accepted of needles and of the rest; the studies."""
    cells, studies = result["cells"], result["studies"]
    kinds = distinct(cell["kind"] for cell in cells)
    probes = [cell for cell in cells if cell["categories"]]
    sections = [_acceptance(result, kind, [cell for cell in cells if cell["kind"] == kind]) for kind in kinds]
    if probes:
        sections.append(_categories("Draft tokens accepted a step, by what they stand in", probes))
    if studies:
        sections.append(_studies(studies))
    return sections


def cache_label(cell: Cell) -> str:
    """What the draft sees: the policy, and of how many tokens."""
    tokens = cell["cache_tokens"]
    return cell["policy"] if tokens is None else f"{cell['policy']} {tokens:,}"


def length_name(length: int) -> str:
    """`2K`; `7,000` for what is no multiple of 1,024."""
    return bucket_name(length) if length % 1024 == 0 else f"{length:,}"


def distinct(names: Iterable[Any]) -> list[Any]:
    """Each once, in the order of its first place."""
    return [*dict.fromkeys(names)]


def mean_sd(measured: Cell | None) -> str:
    """Mean and standard deviation, n behind them."""
    if measured is None:
        return "-"
    sd = "" if measured["sd"] is None else f" ± {measured['sd']:.2f}"
    return f"{measured['mean']:.2f}{sd} (n={measured['n']})"


def _acceptance(result: dict[str, Any], kind: str, cells: list[Cell]) -> Section:
    lengths = [length for length in result["lengths"] if any(cell["length"] == length for cell in cells)]
    found = {(cell["draft"], cache_label(cell), cell["length"]): mean_sd(cell["acceptance_length"]) for cell in cells}
    rows = [
        [draft, cache, *(found.get((draft, cache, length), "-") for length in lengths)]
        for draft, cache in distinct((draft, cache) for draft, cache, _ in found)
    ]
    header = ["draft", "cache", *map(length_name, lengths)]
    return Section(f"Acceptance length, {kind}: mean of documents ± sd", header, rows, ["cache"])


def _categories(title: str, cells: list[Cell]) -> Section:
    rows = [
        [
            cell["kind"],
            cell["draft"],
            cache_label(cell),
            length_name(cell["length"]),
            name,
            number(category["tokens"]),
            mean_sd(category["accepted"]),
            mean_sd(category["acceptance_length"]),
        ]
        for cell in cells
        for name, category in cell["categories"].items()
    ]
    header = ["kind", "draft", "cache", "length", "where", "tokens", "accepted", "acceptance length"]
    return Section(title, header, rows, header[1:5])


def _studies(cells: list[Cell]) -> Section:
    rows = [
        [
            cell["study"],
            cell["draft"],
            cell["kind"],
            length_name(cell["length"]),
            mean_sd(cell["acceptance_length"]),
            mean_sd(cell["coverage"]),
        ]
        for cell in cells
    ]
    header = ["choice", "draft", "kind", "length", "acceptance length", "coverage"]
    return Section("Which attention to trust", header, rows, header[1:4])
