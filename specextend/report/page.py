"""The report as one page of HTML that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from specextend.core import counted, first_line, printable
from specextend.data.run_folder import parse_time
from specextend.report import sections
from specextend.report.tables import Section, duration, number, percent

FORMATS: dict[str, Callable[[Any], str]] = {
    "count": partial(number, digits=0),
    "documents": partial(counted, noun="document"),
    "plain steps": partial(counted, noun="plain step"),
    "times": partial(counted, noun="time"),
    "tokens": partial(counted, noun="token"),
    "1 digit": partial(number, digits=1),
    "2 digits": partial(number, digits=2),
    "percent": percent,
    "duration": duration,
}
"""How the page shows a figure of the report."""
STATES = {
    None: "no end recorded",
    0: "complete",
    2: "refused",
    3: "ended with too many errors",
    75: "stopped; run again to resume",
}
"""What an exit code of the last start means for its run; any other is a failure."""
ALIVE_S = 60.0
"""Age of a driver's last sign of life below which the page calls its run running; a driver beats every 10 s."""
TABLES: tuple[Callable[[dict[str, Any]], Section], ...] = (
    sections.phases,
    sections.limits,
    sections.buckets,
    sections.slowest,
    sections.texts,
    sections.audit,
    sections.errors,
    sections.starts,
)
"""The tables of the page, which names them as their functions."""


def to_html(report: dict[str, Any]) -> str:
    """Render the report as a page.

    It never raises: the texts of a run are there, and must not be lost to a fault of its page, which says so instead.
    """
    try:
        return _render(report)
    except Exception as error:  # noqa: BLE001 - the page itself says what failed, and report.json has the figures
        why = escape(printable(f"{type(error).__name__}: {first_line(error)}"))
        return (
            '<!doctype html><meta charset="utf-8"><title>Report</title>'
            f"<p>This page could not be made ({why}). report.md and report.json hold the figures.</p>\n"
        )


def _render(report: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("specextend", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    plots, no_plots = _plots(report)
    return environment.get_template("page.html").render(
        report=report,
        figure=partial(_figure, report),
        counted=counted,
        tables={table.__name__: table(report) for table in TABLES},
        plots=plots,
        no_plots=no_plots,
        state=_state(report),
        phase_names=sections.PHASE_NAMES,
        kind_names=sections.KIND_NAMES,
        config=_config(report),
    )


def _shown(value: Any) -> Any:
    """Make text safe to show: control characters and signs that reorder their neighbours become codes."""
    return printable(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value


def _plots(report: dict[str, Any]) -> tuple[dict[str, Markup], str]:
    """Return the plots by name, and the reason if there can be none."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # what it says of its font cache would break a JSON log
    try:
        from specextend.report.plots import draw_plots  # matplotlib takes a second to import
    except ImportError as error:
        return {}, f"There are no plots, because matplotlib is not installed ({first_line(error)})."
    return {name: Markup(svg) for name, svg in draw_plots(report).items()}, ""


def _figure(report: dict[str, Any], path: str, how: str) -> Markup:
    """Return an element with a figure of the report, which names its place there. path: keys, joined by dots."""
    value: Any = report
    for key in path.split("."):
        value = None if value is None else value[key]
    if value is None:
        return Markup('<span class="none">not recorded</span>')
    return Markup('<data data-figure="{}" value="{}">{}</data>').format(path, json.dumps(value), FORMATS[how](value))


def _state(report: dict[str, Any]) -> str:
    """Say in a few words how the run stands."""
    if not report["starts"]:
        return "no start recorded"
    last = report["starts"][-1]
    code, sign, now = last["exit_code"], parse_time(last["last_sign"]), parse_time(report["as_of"])
    if sign is not None and now is not None and now - sign < ALIVE_S:
        return "running"
    return STATES.get(code, f"failed with exit {code}; run again to resume")


def _config(report: dict[str, Any]) -> str:
    """Return the parts of the configuration that the report holds, as JSON."""
    run = report["run"] or {}
    shown = {name: value for name, value in run.items() if name not in ("fingerprint", "models") and value is not None}
    return json.dumps(shown, indent=2, ensure_ascii=False)
