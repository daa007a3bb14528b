"""Plots of the report as SVG for a page: text stays text, and colours are the page's variables."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from specextend.core import printable
from specextend.report.sections import PHASE_NAMES

COLORS = {
    "ink": "#f0a001",
    "muted": "#f0a002",
    "line": "#f0a003",
    "accent": "#f0a004",
    "bad": "#f0a005",
    "page": "#f0a006",
    **{f"shade-{number}": f"#f0a01{number}" for number in range(6)},
}
"""Variables of the page's style sheet, each with the colour that stands for it while matplotlib draws."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": COLORS["line"],
    "axes.labelcolor": COLORS["muted"],
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.6,
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["muted"],
    "ytick.color": COLORS["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
SMALL = (4.4, 2.5)
"""Inches of a plot that stands beside another, and fills a telephone."""
MOST_LABELS = 12
"""Bars of a small plot that have room for a number each."""
WIDE = 9.2
"""Inches of a plot as wide as the page."""
Spans = Sequence[tuple[float, float]]


def draw_plots(report: dict[str, Any]) -> dict[str, str]:
    """Draw the plots for which the report has figures, as SVG elements by name.

    Names are `acceptance_by_depth`, `acceptance_by_bucket`, `time_by_bucket`, and `timeline_<run id>` for each start.
    """
    plots: dict[str, Callable[[], Figure]] = {}
    if len(report["acceptance"]["at_least"]) > 1:
        plots["acceptance_by_depth"] = lambda: _acceptance_by_depth(report["acceptance"]["at_least"])
    known = [bucket for bucket in report["buckets"] if bucket["mean_acceptance_length"] is not None]
    if known:
        plots["acceptance_by_bucket"] = lambda: _acceptance_by_bucket(known)
    timed = [bucket for bucket in report["buckets"] if any(bucket["seconds_per_document"].values())]
    if timed:
        plots["time_by_bucket"] = lambda: _time_by_bucket(timed)
    for line in report["timeline"]:
        plots[f"timeline_{line['run_id']}"] = partial(_timeline, line)
    return {name: _svg(draw, name) for name, draw in plots.items()}


def _svg(draw: Callable[[], Figure], salt: str) -> str:
    """Draw a figure as an SVG element without a size of its own. salt: keeps its ids apart from those of others."""
    with rc_context(STYLE | {"svg.hashsalt": salt}):
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(text, format="svg", bbox_inches="tight", pad_inches=0.03, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg


def _acceptance_by_depth(at_least: Sequence[float]) -> Figure:
    """Draw the share of speculative steps that accepted at least so many draft tokens."""
    figure, axes = _small()
    depths = range(1, len(at_least))
    bars = axes.bar(depths, [100 * share for share in at_least[1:]], width=0.62, color=COLORS["accent"])
    if len(depths) <= MOST_LABELS:
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8, color=COLORS["muted"])
    axes.set_xticks(depths[:: -(-len(depths) // MOST_LABELS)])
    axes.set_xlabel("draft tokens accepted, at least")
    axes.set_ylabel("% of speculative steps")
    axes.set_ylim(0, max(5.0, 115 * max(at_least[1:])))
    return figure


def _acceptance_by_bucket(buckets: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the acceptance length over prompt length."""
    figure, axes = _small()
    lengths = [bucket["mean_acceptance_length"] for bucket in buckets]
    bars = axes.bar(range(len(buckets)), lengths, width=0.62, color=COLORS["accent"])
    axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8, color=COLORS["muted"])
    axes.axhline(1.0, color=COLORS["muted"], linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_xticks(range(len(buckets)), [bucket["bucket"] for bucket in buckets])
    axes.set_xlabel("prompt tokens, up to")
    axes.set_ylabel("tokens per speculative step")
    axes.set_ylim(0, 1.15 * max(lengths))
    return figure


def _time_by_bucket(buckets: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the seconds that a document takes, by phase, over prompt length."""
    figure, axes = _small()
    bottoms = [0.0] * len(buckets)
    for number, (phase, name) in enumerate(PHASE_NAMES.items()):
        seconds = [bucket["seconds_per_document"][phase] or 0.0 for bucket in buckets]
        if any(seconds):
            axes.bar(
                range(len(buckets)), seconds, bottom=bottoms, width=0.62, color=COLORS[f"shade-{number}"], label=name
            )
        bottoms = [bottom + value for bottom, value in zip(bottoms, seconds, strict=True)]
    axes.set_xticks(range(len(buckets)), [bucket["bucket"] for bucket in buckets])
    axes.set_xlabel("prompt tokens, up to")
    axes.set_ylabel("seconds per document")
    handles, labels = axes.get_legend_handles_labels()
    style: dict[str, Any] = {"fontsize": 8, "handlelength": 0.9, "columnspacing": 1.2, "borderpad": 0.1}
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3, **style)
    return figure


def _timeline(line: Mapping[str, Any]) -> Figure:
    """Draw what each seat's workers did: loading, documents, and where one died."""
    seats = list(dict.fromkeys(_label(worker) for worker in line["workers"]))
    figure = Figure(figsize=(WIDE, 0.75 + 0.26 * len(seats)))
    axes = figure.add_subplot()
    size, unit = _unit(line["seconds"])
    drawn: dict[str, list[tuple[int, float, float]]] = {"ready": [], "loading": [], "documents": []}
    for worker in line["workers"]:
        place = seats.index(_label(worker))
        for kind, spans in _kinds(worker, line["seconds"]).items():
            drawn[kind] += [(place, begin / size, end / size) for begin, end in spans]
        if worker["reason"] not in (None, "released") and worker["gone_s"] is not None:
            axes.plot(worker["gone_s"] / size, place, marker="x", markersize=7, color=COLORS["bad"], zorder=4)
    is_sparse = len(drawn["documents"]) <= 25 * len(seats)  # edges would cover boxes that are narrower
    edge = {"edgecolor": COLORS["page"], "linewidth": 0.7} if is_sparse else {}
    axes.add_patch(_boxes(drawn["ready"], 0.12, facecolor=COLORS["line"], label="ready, without a document"))
    axes.add_patch(_boxes(drawn["loading"], 0.5, facecolor=COLORS["muted"], alpha=0.55, label="loading"))
    axes.add_patch(_boxes(drawn["documents"], 0.62, facecolor=COLORS["accent"], label="documents", **edge))
    axes.plot([], [], marker="x", linestyle="none", markersize=7, color=COLORS["bad"], label="died")
    axes.set_yticks(range(len(seats)), seats)
    axes.set_ylim(len(seats) - 0.4, -0.6)
    axes.set_xlim(0, line["seconds"] / size)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel(f"{unit} since the start")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=8, handlelength=1.0, borderpad=0.1)
    return figure


def _label(worker: Mapping[str, Any]) -> str:
    """Name the line of a worker; a worker that takes a dead one's seat shares its line."""
    name = worker["worker"] if worker["seat"] is None else f"seat {worker['seat']}"
    known = printable(name).encode("ascii", "backslashreplace")  # matplotlib warns of what its font does not have
    return known.decode()[:24]


def _kinds(worker: Mapping[str, Any], seconds: float) -> dict[str, Spans]:
    """Return the times of a worker by kind, in seconds since the start."""
    begun, ready = worker["begun_s"], worker["ready_s"]
    gone = seconds if worker["gone_s"] is None else worker["gone_s"]
    loaded = gone if ready is None else ready
    return {
        "loading": [] if begun is None else [(begun, max(begun, loaded))],
        "ready": [] if ready is None else [(ready, max(ready, gone))],
        "documents": [(begin, end) for begin, end, _ in worker["spans"]],
    }


def _boxes(boxes: Sequence[tuple[int, float, float]], height: float, **style: Any) -> PathPatch:
    """Make one patch of many boxes, which keeps the page small. boxes: line, begin and end of each."""
    vertices, codes = [(0.0, 0.0)], [Path.MOVETO]
    for place, begin, end in boxes:
        low, high = place - height / 2, place + height / 2
        vertices += [(begin, low), (end, low), (end, high), (begin, high), (begin, low)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return PathPatch(Path(vertices, codes), **{"linewidth": 0, **style})


def _unit(seconds: float) -> tuple[float, str]:
    """Choose the unit of a time axis."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def _small() -> tuple[Figure, Axes]:
    figure = Figure(figsize=SMALL)
    return figure, figure.add_subplot()
