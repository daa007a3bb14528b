"""The report of a run from its rows and records, as JSON and as a page of HTML.

The page has no scripts and needs no other files.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from specextend.core import Checkpoint, ReadOnly, Values, counted, first_line, printable
from specextend.data.commits import commit_sizes
from specextend.data.fingerprint import models_of, num_input_rows, read_manifest, tried_kernels
from specextend.data.listing import GONE, LEFT_OUT, read_errors
from specextend.data.run_folder import (
    RELEASED,
    Start,
    parse_time,
    read_audit,
    read_heartbeat,
    read_starts,
    report_file,
    time_text,
)
from specextend.data.storage import Location, is_uri, read_bytes, resolve, write_bytes
from specextend.report.advice import give_advice
from specextend.report.charts import (
    DONE_COLUMNS,
    ERROR_COLUMNS,
    RunFigures,
    document_figures,
    limit_figures,
)
from specextend.report.gold import gold_figures
from specextend.report.result_rows import find_pdfs, read_rows
from specextend.report.review import read_review
from specextend.report.sections import (
    KIND_NAMES,
    NOT_CHOSEN,
    Figures,
    cut_documents,
    duration,
    look_up,
    num_texts,
    sections,
    shown,
)
from specextend.report.wall_clock import clock_sections
from specextend.stats import spread

SCHEMA_VERSION = 1
"""Version of report.json. It grows if a figure changes its name or meaning."""
_DONE = """
    SELECT count(*) AS texts, (SELECT count(*) FROM errors WHERE answered) AS partial
    FROM done
"""


def write_report(
    output: str,
    folder: Location | None = None,
    *,
    checkpoint: Checkpoint = lambda: None,
    **given: Any,
) -> Values:
    """Write report.json and report.html of `build_report`, and return the report."""
    location = folder or resolve(output)
    report = build_report(output, location, checkpoint=checkpoint, **given)
    pa.default_memory_pool().release_unused()  # drawing needs memory, too
    page = to_html(report)
    checkpoint()
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # lone surrogates become escapes
    write_bytes(report_file(location, "json"), text.encode(errors="backslashreplace"))
    write_bytes(report_file(location, "html"), page.encode(errors="backslashreplace"))
    return report


def build_report(
    output: str,
    folder: Location | None = None,
    *,
    ending: Start | None = None,
    checkpoint: Checkpoint = lambda: None,
    figures: RunFigures | None = None,
    reviewed: str | None = None,
) -> Values:
    """Build the report of a run, which may be in progress, as JSON values.

    Args:
        ending: A start whose record has no end yet.
        checkpoint: Called between tables; may raise.
        figures: Rows of the run, if known.
        reviewed: File with the verdicts of people.

    Raises:
        ValueError: The folder holds no run or a damaged one, or the review is of another run.
    """
    location = folder or resolve(output)
    source = "parts" if figures or commit_sizes(location) else "summaries"
    figures = figures or _read(location, checkpoint)
    manifest = read_manifest(location)
    records = [
        ending if ending and ending.run_id == start.run_id else start
        for start in read_starts(location)
    ]
    documents = document_figures(figures)
    texts = [*chain.from_iterable(documents["texts"].values())]
    pdfs = find_pdfs(location, manifest, [text["doc_id"] for text in texts])
    for text in texts:
        text["pdf"] = pdfs.get(text["doc_id"])
    [counted] = figures.select(_DONE)
    done = counted["texts"] - counted["partial"]
    failed = sum(error["rows"] for error in documents["errors"])
    rows = manifest and num_input_rows(manifest)
    pending = None if rows is None else rows - done - failed
    report = {
        "schema_version": SCHEMA_VERSION,
        "as_of": time_text(time.time()),
        "output": output,
        "source": source,
        "run": manifest and _run(manifest),
        "selection": manifest and manifest.get("selection"),
        "rows": {"input": rows, "done": done, "errors": failed, "pending": pending},
        "partial": counted["partial"],
        **clock_sections(records, figures, read_heartbeat(location)),
        "limits": limit_figures(figures, records),
        "kernels": tried_kernels(records),
        **documents,
        "gold": gold_figures(location, manifest),
        "reviewed": read_review(location, resolve(reviewed)) if reviewed else None,
        "drafting": _drafting(records),
        "not_prepared": _not_prepared(manifest) if manifest else {},
        "audit": read_audit(location),
    }
    finite: Values = json.loads(json.dumps(report), parse_constant=lambda name: None)  # without NaN
    return finite | {"advice": give_advice(finite)}


def read_report(output: str) -> Values:
    """Read the last report of a run, or build one."""
    location = resolve(output)
    content = read_bytes(report_file(location, "json"))
    report: Values = build_report(output, location) if content is None else json.loads(content)
    return report


def reviewed_file(output: str) -> str | None:
    """Return the file of the review in the last report of a run, or None."""
    with suppress(OSError, ValueError):  # such a report is written anew
        content = read_bytes(report_file(resolve(output), "json"))
        if content is not None and (review := json.loads(content).get("reviewed")):
            return str(review["file"])
    return None


def _read(location: Location, checkpoint: Checkpoint) -> RunFigures:
    figures = RunFigures()
    for is_done, table in read_rows(location, DONE_COLUMNS, ERROR_COLUMNS, figures.words):
        checkpoint()
        figures.take(is_done, table)
    return figures


def _drafting(starts: list[Start]) -> Values | None:
    workers = [worker for start in starts for worker in start.workers or ()]
    found = [each.speedup for each in workers if each.speedup is not None]
    return spread(found) if found else None


def _not_prepared(manifest: Values) -> dict[str, int]:
    """Count the failures of `specextend prepare` by reason."""
    path = manifest["config"]["input"]["path"]
    if is_uri(path):  # a report needs no store but its own
        return {}
    try:
        failures = read_errors(resolve(path))
    except (OSError, ValueError, TypeError):  # not of `specextend prepare`
        return {}
    return Counter(failure.reason for failure in failures if failure.reason not in (LEFT_OUT, GONE))


def _run(manifest: Values) -> Values:
    config = manifest["config"]
    sections = ("prompt", "target", "draft", "decoding", "attention", "tree", "cache", "job")
    named = {name: config.get(name) for name in sections}
    named |= {"tasks": config["tasks"]} if config.get("tasks") else {}
    columns = {
        name: value
        for name, value in config.get("input", {}).items()
        if value and name.endswith("_column")
    }
    return {
        "fingerprint": manifest["fingerprint"],
        "models": models_of(manifest),
        "input": columns,
        **named,
    }


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
        left_out=NOT_CHOSEN,
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
