"""The figures of `retrieval` as tables: a line for each draft and cache, a column for each length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specextend.report.buckets import bucket_name
from specextend.report.tables import Section

LENGTHS = "prompt, tokens up to"
MOST_LAYERS = 8
"""Layers that a table lists, beside the last."""
Cell = dict[str, Any]


def retrieval_tables(result: dict[str, Any]) -> list[Section]:
    """Acceptance by length for each kind of document; needles apart from the rest; divergence; the studies."""
    cells, studies = result["cells"], result["studies"]
    kinds = distinct(cell["kind"] for cell in cells)
    sections = [_acceptance(result, kind, [cell for cell in cells if cell["kind"] == kind]) for kind in kinds]
    if probes := [cell for cell in cells if cell["categories"]]:
        sections.append(_needles(result, probes))
    sections.append(_divergence(cells, kinds))
    if result["layers"]:
        sections.append(_layers(result["layers"]))
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


def pooled(measured: Iterable[Cell | None]) -> str:
    """The mean of all documents of several spreads."""
    found = [each for each in measured if each is not None]
    num_documents = sum(each["n"] for each in found)
    return f"{sum(each['mean'] * each['n'] for each in found) / num_documents:.2f}" if found else "-"


def _grouped(cells: Iterable[Cell], *names: str) -> dict[tuple[str, ...], list[Cell]]:
    """Cells by the columns `names` and by what the draft sees."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((*(cell[name] for name in names), cache_label(cell)), []).append(cell)
    return groups


def _needles(result: dict[str, Any], cells: list[Cell]) -> Section:
    """By length for the needle; over all lengths for the rest and for how often the needle was in view."""
    rows = []
    for names, group in _grouped(cells, "kind", "draft").items():
        found = {cell["length"]: cell["categories"]["needle"] for cell in group}
        shares = [mean_sd(found[length]["accepted"]) if length in found else "-" for length in result["lengths"]]
        needle = [cell["categories"]["needle"] for cell in group]
        rest = [cell["categories"]["rest"] for cell in group]
        rows.append(
            [
                *names,
                *shares,
                *(pooled(each[name] for each in needle) for name in ("accepted", "agreement", "visible")),
                pooled(each["accepted"] for each in rest),
            ]
        )
    lengths = [length_name(length) for length in result["lengths"]]
    header = ["kind", "draft", "cache", *lengths, "all", "first guess right", "in view", "rest"]
    return Section("Share of needle and quote tokens that a tree held", header, rows, header[1:3])


def _divergence(cells: list[Cell], kinds: list[str]) -> Section:
    """Over all lengths."""
    rows = []
    for names, group in _grouped(cells, "draft").items():
        of_kind = {kind: [cell for cell in group if cell["kind"] == kind] for kind in kinds}
        texts = [
            f"{pooled(cell['divergence'] for cell in own)} / {pooled(cell['agreement'] for cell in own)}"
            for own in of_kind.values()
        ]
        rows.append([*names, *texts])
    title = "Draft against target at a step's first token: total variation / share of first guesses that are right"
    return Section(title, ["draft", "cache", *kinds], rows, ["cache"])


def _layers(found: list[Cell]) -> Section:
    """The layers that show the needle most often, and the last one."""
    views = distinct((cell["kind"], cell["heads"]) for cell in found)
    shown: dict[int, list[float]] = {}
    for cell in found:
        shown.setdefault(cell["layer"], []).append(0.0 if cell["shown"] is None else cell["shown"]["mean"])
    ranked = sorted(shown, key=lambda layer: (-sum(shown[layer]), layer))
    listed = ranked[:MOST_LAYERS] if max(shown) in ranked[:MOST_LAYERS] else [*ranked[:MOST_LAYERS], max(shown)]
    cells = {(cell["kind"], cell["heads"], cell["layer"]): mean_sd(cell["shown"]) for cell in found}
    rows = [[str(layer), *(cells[(*view, layer)] for view in views)] for layer in listed]
    header = ["layer", *(f"{kind}, {heads}" for kind, heads in views)]
    return Section("Share of needle tokens that a fresh selection by one layer alone shows", header, rows)


def _studies(cells: list[Cell]) -> Section:
    """Over all lengths."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["study"], cell["draft"], cell["kind"]), []).append(cell)
    rows = []
    for names, group in groups.items():
        needle = [cell["categories"]["needle"] for cell in group if cell["categories"]]
        rows.append(
            [
                *names,
                pooled(cell["acceptance_length"] for cell in group),
                *(pooled(each[name] for each in needle) for name in ("accepted", "visible")),
                pooled(cell["coverage"] for cell in group),
            ]
        )
    caches = ", ".join(distinct(map(cache_label, cells)))
    header = ["choice", "draft", "kind", "acceptance length", "needle tokens in a tree", "in view", "coverage"]
    return Section(f"Which attention to trust ({caches})", header, rows, header[1:3])
