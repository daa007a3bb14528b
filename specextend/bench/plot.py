"""Benchmark figures as SVG. Text stays text, and the same JSON gives the same bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from itertools import product
from operator import itemgetter
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specextend.bench.result_tables import DECODE, side_label
from specextend.bench.retrieval_tables import Cell, cache_label, distinct, length_name
from specextend.bench.series_tables import (
    Quartiles,
    SeriesFigures,
    decode_speed,
    documents_per_hour,
    ms_per_retrieval,
    ms_per_step,
)

# Okabe and Ito's colours, told apart with any colour vision, without the yellow that is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LineStyle = dict[str, Any]
"""Keywords of matplotlib for a line."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specextend",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def plot(result: dict[str, Any]) -> bytes:
    """Draw the figures of one section as SVG. Raises ValueError if the section has no drawing."""
    draw = _DRAWINGS.get(result["kind"])
    if draw is None:
        raise ValueError(f"there are drawings for the sections {', '.join(_DRAWINGS)}, not for {result['kind']!r}")
    with rc_context(STYLE):
        figure = draw(result)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return svg.getvalue()


def draw_compare(result: dict[str, Any]) -> Figure:
    """Draw decoding speed over autoregressive by length, as median and range. Raises ValueError without that side."""
    base = "autoregressive"
    sides = [name for name in result["sides"] if name != base]
    if base not in result["sides"] or not sides:
        raise ValueError(f"a drawing of compare needs the side {base} and another; measure with both")
    figure = Figure(figsize=(8.0, 4.0))
    axes = figure.add_subplot()
    for number, name in enumerate(sides):
        offset = 0.8 * ((number + 0.5) / len(sides) - 0.5)
        ratios = [group["ratios"][f"{name}/{base}"][DECODE] for group in result["buckets"].values()]
        _points(axes, ratios, offset, _line_style(number), side_label(result, name))
    axes.axhline(1.0, color="#444444", linewidth=1.0, linestyle="--", label=base)
    axes.margins(y=0.1)
    names = [f"{name}\nn = {group['documents']}" for name, group in result["buckets"].items()]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xlabel("prompt, tokens up to")
    axes.set_ylabel("decoding speed over autoregressive")
    axes.set_title(f"Median of documents, and range\n{_machine(result)}", fontsize=9, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_retrieval(result: dict[str, Any]) -> Figure:
    """Draw acceptance by prompt length: a column for each kind of document, a row for each draft, a line per cache."""
    cells: list[Cell] = [cell for cell in result["cells"] if cell["acceptance_length"] is not None]
    if not cells:
        raise ValueError("no cell has an acceptance length to draw")
    kinds, drafts = distinct(cell["kind"] for cell in cells), distinct(cell["draft"] for cell in cells)
    styles = _cache_styles(cells)
    figure = Figure(figsize=(2.0 * len(kinds) + 1.2, 1.7 * len(drafts) + 0.8), layout="constrained")
    panels = figure.subplots(len(drafts), len(kinds), squeeze=False, sharex=True, sharey="col")
    for (row, draft), (column, kind) in product(enumerate(drafts), enumerate(kinds)):
        axes = panels[row][column]
        own = [cell for cell in cells if (cell["draft"], cell["kind"]) == (draft, kind)]
        for number, (cache, style) in enumerate(styles.items()):
            _line(axes, [cell for cell in own if cache_label(cell) == cache], style, number - (len(styles) - 1) / 2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(result["lengths"], [length_name(length) for length in result["lengths"]])
        axes.minorticks_off()
        if row == 0:
            axes.set_title(kind, fontsize=9)
        if column == 0:
            axes.set_ylabel(draft, fontsize=8)
    figure.supxlabel("prompt, tokens up to", fontsize=9)
    figure.supylabel("acceptance length: mean of documents, sd", fontsize=9)
    figure.suptitle(_machine(result), fontsize=9)
    lines = [Line2D([], [], label=cache, **style) for cache, style in styles.items()]
    figure.legend(handles=lines, loc="outside right upper", title="the draft sees")
    return figure


def draw_variants(result: dict[str, Any]) -> Figure:
    """Draw decoding speed over the base for each variant of a series, a marker for each column of its tables."""
    series = SeriesFigures(result)
    names = [name for name in result["variants"] if series.timings(name) and name != series.base]
    figure = Figure(figsize=(max(6.0, 0.7 * len(names)), 4.0))
    axes = figure.add_subplot()
    for number, (column, header) in enumerate(zip(series.columns, series.headers, strict=True)):
        found = [series.ratios(name, series.base, column, decode_speed) for name in names]
        style = _line_style(number) | {"linestyle": "none"}
        _quartiles(axes, _aside(number, len(series.columns), len(names)), found, style, header)
    axes.axhline(1.0, color="#444444", linewidth=1.0, linestyle="--", label=series.base)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_ylabel(f"decoding speed over {series.base}")
    _finish_series(axes, result)
    return figure


def draw_batch(result: dict[str, Any]) -> Figure:
    """Draw documents an hour by batch size, a line for each mode."""
    series, variants = SeriesFigures(result), result["variants"]
    [column] = series.columns
    sizes = distinct(about["batch_size"] for about in variants.values())
    figure = Figure(figsize=(6.0, 4.0))
    axes = figure.add_subplot()
    for number, mode in enumerate(distinct(about["mode"] for about in variants.values())):
        names = [name for name, about in variants.items() if about["mode"] == mode]
        found = [series.values(name, column, documents_per_hour) for name in names]
        style = _line_style(number) | {"linestyle": "-"}
        places = [place + 0.03 * number for place in range(len(sizes))]
        _quartiles(axes, places, found, style, f"{mode} (n={series.num_rounds})")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("documents decoded together")
    axes.set_ylabel("documents an hour")
    axes.set_ylim(bottom=0)
    _finish_series(axes, result)
    return figure


def draw_retrieval_time(result: dict[str, Any]) -> Figure:
    """Draw the time of a step and of a retrieval by prompt length."""
    series = SeriesFigures(result)
    [name] = result["variants"]
    shown = zip(series.columns, series.headers, strict=True)
    headers = {column: header for column, header in shown if column != "all"}
    figure = Figure(figsize=(6.0, 4.0))
    axes = figure.add_subplot()
    for number, (label, value) in enumerate((("a decoding step", ms_per_step), ("a retrieval", ms_per_retrieval))):
        found = [series.values(name, column, value) for column in headers]
        _quartiles(axes, [*range(len(headers))], found, _line_style(number) | {"linestyle": "-"}, label)
    axes.set_xticks(range(len(headers)), [*headers.values()])
    axes.set_xlabel("prompt, tokens up to")
    axes.set_ylabel("milliseconds")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    _finish_series(axes, result)
    return figure


def _aside(number: int, count: int, num_places: int) -> list[float]:
    """Place the markers of one of `count` series at each of `num_places` ticks, beside those of the others."""
    return [place + 0.6 * ((number + 0.5) / count - 0.5) for place in range(num_places)]


def _quartiles(
    axes: Axes, places: Sequence[float], found: Sequence[Quartiles | None], style: LineStyle, label: str
) -> None:
    """Draw medians, with a bar from the lower quartile to the upper one."""
    present = [(place, each) for place, each in zip(places, found, strict=True) if each is not None]
    own = [place for place, _ in present]
    axes.plot(own, [each.median for _, each in present], label=label, **style)
    _bars(axes, own, [(each.low, each.high) for _, each in present], style)


def _finish_series(axes: Axes, result: dict[str, Any]) -> None:
    note = "Median and quartiles, or range if n is below 4"
    axes.set_title(f"{note}\n{_machine(result)}", fontsize=9, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _cache_styles(cells: list[Cell]) -> dict[str, LineStyle]:
    """Give each policy a colour, and each number of visible tokens a marker and a dash; by the label of the cache."""
    policies = distinct(cell["policy"] for cell in cells)
    budgets = distinct(cell["cache_tokens"] for cell in cells if cell["cache_tokens"] is not None)
    styles = {}
    for cell in cells:
        budget = 0 if cell["cache_tokens"] is None else budgets.index(cell["cache_tokens"])
        style = _line_style(policies.index(cell["policy"])) | {"linestyle": DASHES[budget % len(DASHES)]}
        styles[cache_label(cell)] = style | {"marker": MARKERS[budget % len(MARKERS)]}
    return styles


def _line(axes: Axes, cells: list[Cell], style: LineStyle, aside: float) -> None:
    """Draw mean and standard deviation of one cache at each length, moved aside so that error bars do not overlap."""
    measured = [(cell["length"], cell["acceptance_length"]) for cell in sorted(cells, key=itemgetter("length"))]
    places, means = [length * (1 + 0.04 * aside) for length, _ in measured], [each["mean"] for _, each in measured]
    axes.plot(places, means, **style)
    sds = [each["sd"] or 0.0 for _, each in measured]
    _bars(axes, places, [(mean - sd, mean + sd) for mean, sd in zip(means, sds, strict=True)], style)


def _points(axes: Axes, ratios: list[dict[str, Any] | None], offset: float, style: LineStyle, label: str) -> None:
    """Draw a marker and a range of one side for each bucket that has a ratio."""
    found = [(place + offset, each) for place, each in enumerate(ratios) if each is not None]
    places = [place for place, _ in found]
    axes.plot(places, [each["median"] for _, each in found], label=label, **style | {"linestyle": "none"})
    _bars(axes, places, [(each["min"], each["max"]) for _, each in found], style)


def _bars(axes: Axes, places: list[float], spans: list[tuple[float, float]], style: LineStyle) -> None:
    """Draw vertical bars as one path, which keeps the file small."""
    xs = [x for place in places for x in (place, place, math.nan)]
    ys = [y for low, high in spans for y in (low, high, math.nan)]
    axes.plot(xs, ys, **style | {"marker": "none", "linestyle": "-"})


def _line_style(number: int) -> LineStyle:
    """Return colour and marker of the line `number`."""
    return {
        "color": COLORS[number % len(COLORS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4.0,
        "linewidth": 1.2,
    }


def _machine(result: dict[str, Any]) -> str:
    environment, target = result["environment"], result["config"]["target"]
    return f"{target['model'].rpartition('/')[2]}, {target['dtype']}, {environment['device']}"


_DRAWINGS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "compare": draw_compare,
    "retrieval": draw_retrieval,
    "ablation": draw_variants,
    "reasoning": draw_variants,
    "sweep": draw_variants,
    "batch": draw_batch,
    "retrieval-time": draw_retrieval_time,
}
