"""The report as one page of HTML that needs nothing else: no network, no script, no other file."""

import json
from collections import defaultdict
from typing import Any

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
    "Documents an hour": "wall_clock.documents_per_hour",
    "Output tokens a second": "wall_clock.output_tokens_per_s",
    "Tokens per speculative step": "acceptance.mean_acceptance_length",
    "Steps that were speculative": "acceptance.speculative_share",
    "Cost of 1,000 documents": "wall_clock.cost.per_thousand_documents",
    "Worker hours": "wall_clock.worker_hours",
}
"""What the page shows first, in large figures; those without a value are left out."""
STATES = {
    None: "no end recorded",
    0: "complete",
    2: "refused",
    3: "ended with too many errors",
    75: "stopped; run again to resume",
}
"""What an exit code of the last start means for its run; any other is a failure."""
ALIVE_S = 60.0
"""Age of a driver's last sign of life below which the page calls its run running; a driver beats
every 10 s.
"""


def to_html(report: ReadOnly) -> str:
    """Render the report as a page.

    It never raises: the texts of a run are there, and must not be lost to a fault of its page,
    which says so instead.
    """
    try:
        return _render(report)
    except Exception as error:  # noqa: BLE001 - the page itself says what failed, and report.json has the figures
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


def _shown(value: Any) -> Any:
    """Make text safe to show: control characters and signs that reorder their neighbours become
    codes.
    """
    return (
        printable(value, keep="\n")
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


def _seats(timeline: ReadOnly) -> dict[str, list[ReadOnly]]:
    """Group the workers of a start by the name of their seat, or by their own; without those that
    had no process.
    """
    seats: defaultdict[str, list[ReadOnly]] = defaultdict(list)
    for worker in timeline["workers"]:
        if worker["begun_s"] is not None or worker["spans"]:
            seats[
                worker["worker"][:16] if worker["seat"] is None else f"seat {worker['seat']}"
            ].append(worker)
    return seats


def _state(report: ReadOnly) -> str:
    """Say in a few words how the run stands."""
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
    """Return the parts of the configuration that the report holds, as JSON."""
    run = report["run"] or {}
    shown = {
        name: value
        for name, value in run.items()
        if name not in ("fingerprint", "models") and value is not None
    }
    return json.dumps(shown, indent=2, ensure_ascii=False)
