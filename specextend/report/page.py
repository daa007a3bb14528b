"""The report as one page of HTML without scripts or other files."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from specextend.core import ReadOnly, counted, first_line, printable
from specextend.data.run_folder import RELEASED, parse_time
from specextend.report.sections import (
    KIND_NAMES,
    LEFT_OUT,
    Figures,
    cut_documents,
    duration,
    look_up,
    num_texts,
    sections,
    shown,
)

TILES: Figures = {
    "Documents done": "rows.done",
    "Failed": "rows.errors",
    "Left to do": "rows.pending",
    "Texts with a flag": "flagged_texts",
    "Good, by a review": "reviewed.good.share",
    "Documents an hour": "wall_clock.documents_per_hour",
    "Output tokens a second": "wall_clock.output_tokens_per_s",
    "Tokens per speculative step": "acceptance.mean_acceptance_length",
    "Steps that were speculative": "acceptance.speculative_share",
    "Cost of 1,000 documents": "wall_clock.cost.per_thousand_documents",
    "Worker hours": "wall_clock.worker_hours",
}
"""Large figures of the page, if known."""
STATES = {
    None: "no end recorded",
    0: "complete",
    2: "refused",
    3: "ended with too many errors",
    75: "stopped; run again to resume",
}
"""States of a run by the exit code of its last start."""
_BY_LENGTH = (
    ("documents", "Documents", 0),
    ("seconds_per_document", "Seconds of a document", 1),
    ("mean_acceptance_length", "Tokens per speculative step", 2),
)
ALIVE_S = 60.0
"""Age of the last sign of life of a running driver, at most."""


def to_html(report: ReadOnly) -> str:
    """Render the report as a page.

    A fault of the page must not end a run with finished texts: the page shows it.
    """
    try:
        return _render(report)
    except Exception as error:  # noqa: BLE001 - the page shows it
        why = escape(printable(f"{type(error).__name__}: {first_line(error)}"))
        return (
            '<!doctype html><meta charset="utf-8"><title>Report</title>'
            f"<p>This page could not be made ({why}). report.json holds the figures.</p>\n"
        )


def _render(report: ReadOnly) -> str:
    environment = Environment(
        loader=PackageLoader("specextend", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return environment.get_template("page.html").render(
        report=report,
        state=_state(report),
        starts=counted(len(report["starts"]), "start"),
        tiles=[(name, path, shown(path, look_up(report, path))) for name, path in TILES.items()],
        sections=sections(report),
        lengths=_lengths(report),
        certainty=_certainty(report),
        left_out=LEFT_OUT,
        kind_names=KIND_NAMES,
        seats_of=_seats,
        duration=duration,
        counted=counted,
        num_texts=num_texts,
        cut_documents=cut_documents,
        released=RELEASED,
        config=_config(report),
    )


class Plot(NamedTuple):
    """A column chart."""

    key: str
    title: str
    labels: Sequence[str]
    values: Sequence[float | None]
    digits: int
    most: float
    """Value of the highest column."""


def _lengths(report: ReadOnly) -> list[Plot]:
    plots = []
    for key, title, digits in _BY_LENGTH:
        given = [bucket[key] for bucket in report["buckets"]]
        values = [sum(of.values()) if isinstance(of, dict) else of for of in given]
        if most := max((value or 0 for value in values), default=0):
            labels = [bucket["bucket"] for bucket in report["buckets"]]
            plots.append(Plot(key, title, labels, values, digits, most))
    return plots


def _certainty(report: ReadOnly) -> list[Plot]:
    return [
        Plot(
            f"calibration_{field}",
            field,
            [f"{group['probability']:.2f}" for group in of["calibration"]],
            [100 * group["accuracy"] for group in of["calibration"]],
            0,
            100,
        )
        for field, of in (report.get("gold") or {}).items()
        if of["calibration"]
    ]


def _shown(value: Any) -> Any:
    """Replace control characters and signs that reorder text by codes."""
    return (
        printable(value, keep="\n")
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


def _seats(timeline: ReadOnly) -> dict[str, list[ReadOnly]]:
    """Group workers with a process by seat."""
    seats: defaultdict[str, list[ReadOnly]] = defaultdict(list)
    for worker in timeline["workers"]:
        if worker["begun_s"] is not None or worker["spans"]:
            seats[
                worker["worker"][:16] if worker["seat"] is None else f"seat {worker['seat']}"
            ].append(worker)
    return seats


def _state(report: ReadOnly) -> str:
    if not report["starts"]:
        return "no start recorded"
    last = report["starts"][-1]
    code = last["exit_code"]
    sign = parse_time(last["last_sign"])
    now = parse_time(report["as_of"])
    if sign is not None and now is not None and now - sign < ALIVE_S:
        return "running"
    return STATES.get(code, f"failed with exit {code}; run again to resume")


def _config(report: ReadOnly) -> str:
    run = report["run"] or {}
    shown = {
        name: value
        for name, value in run.items()
        if name not in ("fingerprint", "models") and value is not None
    }
    return json.dumps(shown, indent=2, ensure_ascii=False)
