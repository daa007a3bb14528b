"""Tables of the section `kernels`: times, rates, errors of logits and acceptance, by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specextend.bench.kernel_errors import PARTS
from specextend.report.tables import Section, number, percent
from specextend.stats import ratio


def kernel_tables(result: dict[str, Any]) -> list[Section]:
    """Make the tables of a section."""
    return [
        _cells(result["attention"], "Attention of a decoding step, all layers, ms: median (lowest, sd)", 1),
        _cells(result["chunks"], "Attention of a chunk of a prompt, GFLOP/s: median (highest, sd)", 0, best="max"),
        _cells(result["steps"], "A whole step of the target, ms: median (lowest, sd)", 1),
        _errors(result["errors"]),
        *([_acceptance(result)] if result["acceptance"] is not None else []),
    ]


def _cells(cells: Sequence[dict[str, Any]], title: str, digits: int, *, best: str = "min") -> Section:
    """Show a row for each number of keys and queries, a column for each kernel."""
    names = dict.fromkeys(name for cell in cells for name in cell["kernels"])
    reads = ["read once"] if "read_ms" in cells[0] else []
    rows = [
        [
            f"{cell['keys']:,}, {cell['queries']}",
            *(_spread(cell["kernels"].get(name), digits, best) for name in names),
            *(number(cell["read_ms"], digits) for _ in reads),
        ]
        for cell in cells
    ]
    return Section(title, ["keys, queries", *names, *reads], rows)


def _spread(measured: dict[str, Any] | None, digits: int, best: str) -> str:
    if measured is None:
        return "-"
    sd = "" if measured["sd"] is None else f", {number(measured['sd'], digits)}"
    return f"{number(measured['median'], digits)} ({number(measured[best], digits)}{sd})"


def _errors(errors: dict[str, Any]) -> Section:
    """Show a row for each kernel and implementation."""
    rows = [
        [
            name,
            *(f"{parts[part]['largest']:.3g}" for part in PARTS),
            *(f"{parts[part]['mean']:.3g}" for part in PARTS),
            *(percent(parts[part]["same_token"]) for part in PARTS),
        ]
        for name, parts in (errors["kernels"] | errors["transformers"]).items()
    ]
    header = ["side", *(f"{figure}, {part}" for figure in ("largest", "mean", "same token") for part in PARTS)]
    return Section(
        "Error of logits against the target in float32, and positions with the same likeliest token", header, rows
    )


def _acceptance(result: dict[str, Any]) -> Section:
    """Show a row for each kernel."""
    measured = result["acceptance"]
    base = measured["reference"]["mean_acceptance_length"]
    rows = [
        [
            name,
            number(each["mean_acceptance_length"], 3),
            number(_ratio(each["mean_acceptance_length"], base), 3),
            ", ".join(number(length) for length in each["by_document"]),
            number(each["num_spec_steps"]),
            f"{each['same_outputs']} of {len(each['by_document'])}",
        ]
        for name, each in measured.items()
    ]
    header = ["kernel", "acceptance length", "over reference", "by document", "steps", "outputs like reference's"]
    return Section("Acceptance, greedy, with trees of a fixed size", header, rows)


def _ratio(length: float | None, base: float | None) -> float | None:
    return None if length is None or base is None else ratio(length, base)
