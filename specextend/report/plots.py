"""Plots of the report as SVG for a page: text stays text, and colours are the page's variables."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from specextend.core import counted, printable
from specextend.data.run_folder import RELEASED
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
Box = tuple[int, float, float]
"""A line of the time line, and begin and end of what is drawn on it, in seconds."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing, and the title of the section to which it belongs."""

    section: str
    name: str
    about: str
    svg: str
    is_wide: bool = False


@rc_context(STYLE)
def draw_plots(report: Mapping[str, Any]) -> list[Plot]:
    """Draw the plots for which the report has figures."""
    at_least, buckets, title = report["acceptance"]["at_least"][1:], report["buckets"], "By prompt length"
    known = [bucket for bucket in buckets if bucket["mean_acceptance_length"] is not None]
    names = [bucket["bucket"] for bucket in known]
    lengths = [bucket["mean_acceptance_length"] for bucket in known]
    plots = []
    if at_least:
        depths, shares = [str(depth + 1) for depth in range(len(at_least))], [100 * share for share in at_least]
        figure = _bars(depths, shares, "draft tokens accepted, at least", "% of speculative steps", "%.0f", 5.0)
        plots.append(_plot(title, "acceptance_by_depth", "Speculative steps by accepted draft tokens", figure))
    if known:
        figure = _bars(names, lengths, "prompt tokens, up to", "tokens per speculative step", "%.2f")
        plots.append(_plot(title, "acceptance_by_bucket", "Acceptance; 1 is decoding without a draft", figure))
    if any(any(bucket["seconds_per_document"].values()) for bucket in buckets):
        plots.append(_plot(title, "time_by_bucket", "Mean seconds of a worker, by phase", _time_by_bucket(buckets)))
    for line in report["timeline"]:
        left_out = f"; left out: {counted(line['seats_left_out'], 'more seat')}" if line["seats_left_out"] else ""
        about = f"Start {line['run_id']}{left_out}"
        plots.append(_plot("The workers' time", f"timeline_{line['run_id']}", about, _timeline(line), is_wide=True))
    return plots


def _plot(section: str, name: str, about: str, figure: Figure, is_wide: bool = False) -> Plot:
    """Draw a figure as an SVG element without a size of its own; its name keeps its ids apart from those of others."""
    text = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", bbox_inches="tight", pad_inches=0.03, metadata=nothing)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for variable, color in COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    return Plot(section, name, about, svg, is_wide)


def _bars(
    names: Sequence[str], values: Sequence[float], x_label: str, y_label: str, fmt: str, least: float = 0.0
) -> Figure:
    """Draw one bar for each name. least: height of the axis if all bars are low."""
    figure, axes = _small(names, x_label, y_label)
    bars = axes.bar(range(len(names)), values, width=0.62, color=COLORS["accent"])
    if len(names) <= MOST_LABELS:
        axes.bar_label(bars, fmt=fmt, padding=2, fontsize=8, color=COLORS["muted"])
    axes.set_ylim(0, max(least, 1.15 * max(values)))
    return figure


def _time_by_bucket(buckets: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the seconds that a document takes, by phase, over prompt length."""
    figure, axes = _small([bucket["bucket"] for bucket in buckets], "prompt tokens, up to", "seconds per document")
    bottoms = np.zeros(len(buckets))
    for number, (phase, name) in enumerate(PHASE_NAMES.items()):
        seconds = np.array([bucket["seconds_per_document"][phase] or 0.0 for bucket in buckets])
        if seconds.any():
            color = COLORS[f"shade-{number}"]
            axes.bar(range(len(buckets)), seconds, bottom=bottoms, width=0.62, color=color, label=name)
        bottoms += seconds
    style: dict[str, Any] = {"fontsize": 8, "handlelength": 0.9, "columnspacing": 1.2, "borderpad": 0.1}
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3, **style)
    return figure


def _small(names: Sequence[str], x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Make a small plot with a place for each name; of many names only some are written."""
    figure = Figure(figsize=SMALL)
    axes = figure.add_subplot()
    step = -(-len(names) // MOST_LABELS)
    axes.set_xticks(range(0, len(names), step), names[::step])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _timeline(line: Mapping[str, Any]) -> Figure:
    """Draw what each seat's workers did: loading, documents, and where one died."""
    seats = list(dict.fromkeys(_label(worker) for worker in line["workers"]))
    figure = Figure(figsize=(WIDE, 0.75 + 0.26 * len(seats)))
    axes = figure.add_subplot()
    size, unit = _unit(line["seconds"])
    ready, loading, documents = list[Box](), list[Box](), list[Box]()
    for worker in line["workers"]:
        place = seats.index(_label(worker))
        begun_s, ready_s = worker["begun_s"], worker["ready_s"]
        gone_s = line["seconds"] if worker["gone_s"] is None else worker["gone_s"]
        if begun_s is not None:
            loading.append((place, begun_s, gone_s if ready_s is None else ready_s))
        if ready_s is not None:
            ready.append((place, ready_s, gone_s))
        documents += [(place, begin, end) for begin, end, _ in worker["spans"]]
        if worker["reason"] not in (None, RELEASED) and worker["gone_s"] is not None:
            axes.plot(gone_s / size, place, marker="x", markersize=7, color=COLORS["bad"], zorder=4)
    is_sparse = len(documents) <= 25 * len(seats)  # edges would cover boxes that are narrower
    edge = {"edgecolor": COLORS["page"], "linewidth": 0.7} if is_sparse else {}
    axes.add_patch(_boxes(ready, size, 0.12, facecolor=COLORS["line"], label="ready, without a document"))
    axes.add_patch(_boxes(loading, size, 0.5, facecolor=COLORS["muted"], alpha=0.55, label="loading"))
    axes.add_patch(_boxes(documents, size, 0.62, facecolor=COLORS["accent"], label="documents", **edge))
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


def _boxes(boxes: Sequence[Box], size: float, height: float, **style: Any) -> PathPatch:
    """Make one patch of many boxes, which keeps the page small. size: seconds of the time axis' unit."""
    vertices, codes = [(0.0, 0.0)], [Path.MOVETO]
    for place, begin_s, end_s in boxes:
        begin, end = begin_s / size, max(begin_s, end_s) / size
        low, high = place - height / 2, place + height / 2
        vertices += [(begin, low), (end, low), (end, high), (begin, high), (begin, low)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return PathPatch(Path(vertices, codes), **{"linewidth": 0, **style})


def _unit(seconds: float) -> tuple[float, str]:
    """Choose the unit of a time axis."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
