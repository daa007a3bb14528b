"""The figures of `retrieval` as tables: a row for each draft and cache, a column for each prompt length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from specextend.report.statistics import bucket_name
from specextend.report.tables import Section

MOST_LAYERS = 8
"""Number of layers that a table lists, beside the last one."""
Cell = dict[str, Any]


def retrieval_tables(result: dict[str, Any]) -> list[Section]:
    """Build the tables of acceptance by kind of document, needles, divergence, layers and retrieval's own choices."""
    cells = [{**cell, "cache": cache_label(cell)} for cell in result["cells"]]
    kinds = distinct(cell["kind"] for cell in cells)
    sections = [_acceptance(result, kind, [cell for cell in cells if cell["kind"] == kind]) for kind in kinds]
    if probes := [cell for cell in cells if cell["categories"]]:
        sections += [_needles(result, probes), _needles_in_view(result, probes)]
    sections.append(_divergence(cells, kinds))
    if result["layers"]:
        sections.append(_layers(result["layers"]))
    if result["studies"]:
        sections.append(_studies(result["studies"]))
    return sections


def cache_label(cell: Cell) -> str:
    """Name what the draft sees: the cache policy and its number of visible tokens."""
    tokens = cell["cache_tokens"]
    return cell["policy"] if tokens is None else f"{cell['policy']} {tokens:,}"


def length_name(length: int) -> str:
    """Name a prompt length: `2K`, or `7,000` if it is no multiple of 1,024."""
    return bucket_name(length) if length % 1024 == 0 else f"{length:,}"


def distinct(items: Iterable[Any]) -> list[Any]:
    """Drop repeated items and keep the order."""
    return [*dict.fromkeys(items)]


def mean_sd(measured: Cell | None) -> str:
    """Format mean, standard deviation and n."""
    if measured is None:
        return "-"
    sd = "" if measured["sd"] is None else f" ± {measured['sd']:.2f}"
    return f"{measured['mean']:.2f}{sd} (n={measured['n']})"


def _pool(cells: Iterable[Cell], *keys: str) -> defaultdict[tuple[Any, ...], str]:
    """Format the mean over the documents of all cells that agree in `keys`: (*keys, measure) -> text, or `-`."""
    rows = [
        {**{key: cell[key] for key in keys}, "measure": name, "n": each["n"], "sum": each["n"] * each["mean"]}
        for cell in cells
        for name, each in _measures(cell)
    ]
    grouped = pa.Table.from_pylist(rows).group_by([*keys, "measure"], use_threads=False)
    sums = grouped.aggregate([("n", "sum"), ("sum", "sum")]).to_pylist()
    means = {tuple(row[key] for key in (*keys, "measure")): f"{row['sum_sum'] / row['n_sum']:.2f}" for row in sums}
    return defaultdict(lambda: "-", means)


def _measures(cell: Cell) -> Iterator[tuple[str, Cell]]:
    """Yield the measures that a cell has; those of needle tokens and of the rest are named `needle accepted` etc."""
    for name in ("acceptance_length", "agreement", "divergence", "coverage"):
        if cell[name] is not None:
            yield name, cell[name]
    for category, measured in cell["categories"].items():
        for name in ("accepted", "agreement", "visible"):
            if measured[name] is not None:
                yield f"{category} {name}", measured[name]


def _acceptance(result: dict[str, Any], kind: str, cells: list[Cell]) -> Section:
    lengths = [length for length in result["lengths"] if any(cell["length"] == length for cell in cells)]
    found = {(cell["draft"], cell["cache"], cell["length"]): mean_sd(cell["acceptance_length"]) for cell in cells}
    rows = [
        [draft, cache, *(found.get((draft, cache, length), "-") for length in lengths)]
        for draft, cache in distinct((draft, cache) for draft, cache, _ in found)
    ]
    header = ["draft", "cache", *map(length_name, lengths)]
    return Section(f"Acceptance length, {kind}: mean of documents ± sd", header, rows, ["cache"])


def _needles(result: dict[str, Any], cells: list[Cell]) -> Section:
    """Show needle tokens by length, then means over all lengths: needle tokens, their visibility, and the rest."""
    keys = ("kind", "draft", "cache")
    pooled = _pool(cells, *keys)
    found = {(*(cell[key] for key in keys), cell["length"]): cell["categories"]["needle"]["accepted"] for cell in cells}
    measures = ("needle accepted", "needle agreement", "needle visible", "rest accepted")
    rows = [
        [
            *group,
            *(mean_sd(found.get((*group, length))) for length in result["lengths"]),
            *(pooled[*group, measure] for measure in measures),
        ]
        for group in distinct(key[:-1] for key in found)
    ]
    lengths = [length_name(length) for length in result["lengths"]]
    header = ["kind", "draft", "cache", *lengths, "all", "first guess right", "in view", "rest"]
    return Section("Share of needle and quote tokens accepted from a tree", header, rows, header[1:3])


def _needles_in_view(result: dict[str, Any], cells: list[Cell]) -> Section:
    """Show by length how often a draft that does not see everything sees what it needs."""
    keys = ("kind", "draft", "cache")
    chosen = [cell for cell in cells if cell["cache_tokens"] is not None]
    found = {(*(cell[key] for key in keys), cell["length"]): cell["categories"]["needle"]["visible"] for cell in chosen}
    rows = [
        [*group, *(mean_sd(found.get((*group, length))) for length in result["lengths"])]
        for group in distinct(key[:-1] for key in found)
    ]
    header = ["kind", "draft", "cache", *map(length_name, result["lengths"])]
    title = "Needle accuracy: share of needle and quote tokens whose source is in view when they are decided"
    return Section(title, header, rows, header[1:3])


def _divergence(cells: list[Cell], kinds: list[str]) -> Section:
    """Show means over all lengths."""
    pooled = _pool(cells, "draft", "cache", "kind")
    rows = [
        [
            *group,
            *(f"{pooled[*group, kind, 'divergence']} / {pooled[*group, kind, 'agreement']}" for kind in kinds),
        ]
        for group in distinct((cell["draft"], cell["cache"]) for cell in cells)
    ]
    title = "Draft and target at each step's first token: total variation / share of first guesses that are right"
    return Section(title, ["draft", "cache", *kinds], rows, ["cache"])


def _layers(found: list[Cell]) -> Section:
    """Show the layers that show the needle most often, and the last one."""
    views = distinct((cell["kind"], cell["heads"]) for cell in found)
    shown = [
        {"layer": cell["layer"], "mean": 0.0 if cell["shown"] is None else cell["shown"]["mean"]} for cell in found
    ]
    sums = pa.Table.from_pylist(shown).group_by("layer", use_threads=False).aggregate([("mean", "sum")])
    ranked = sums.sort_by([("mean_sum", "descending"), ("layer", "ascending")])["layer"].to_pylist()
    listed = distinct([*ranked[:MOST_LAYERS], max(ranked)])
    cells = {(cell["kind"], cell["heads"], cell["layer"]): mean_sd(cell["shown"]) for cell in found}
    rows = [[str(layer), *(cells[(*view, layer)] for view in views)] for layer in listed]
    header = ["layer", *(f"{kind}, {heads}" for kind, heads in views)]
    return Section("Share of needle tokens that a fresh selection by one layer alone shows", header, rows)


def _studies(cells: list[Cell]) -> Section:
    """Show means over all lengths."""
    keys = ("study", "draft", "kind")
    pooled = _pool(cells, *keys)
    measures = ("acceptance_length", "needle accepted", "needle visible", "coverage")
    rows = [
        [*group, *(pooled[*group, measure] for measure in measures)]
        for group in distinct(tuple(cell[key] for key in keys) for cell in cells)
    ]
    caches = ", ".join(distinct(map(cache_label, cells)))
    header = ["choice", "draft", "kind", "acceptance length", "needle tokens in a tree", "in view", "coverage"]
    return Section(f"Effect of scoring layer and refresh interval ({caches})", header, rows, header[1:3])
