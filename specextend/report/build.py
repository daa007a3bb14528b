"""Building the report of a run folder from its rows and records, and writing it to files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from specextend.data.audit_rows import read_audits
from specextend.data.fingerprint import models_of, num_input_rows, read_manifest
from specextend.data.run_folder import Start, read_heartbeat, read_starts, report_file, time_text
from specextend.data.storage import Location, read_bytes, resolve, write_bytes
from specextend.report.advice import give_advice
from specextend.report.agreement import audit_figures, audit_seconds
from specextend.report.figures import DONE_COLUMNS, ERROR_COLUMNS, RunFigures
from specextend.report.limit_shares import limits_section
from specextend.report.page import to_html
from specextend.report.rows import Rows
from specextend.report.sections import to_markdown
from specextend.report.timeline import tail_section, timeline_section
from specextend.report.wall_clock import start_section, timed_documents, timed_starts, wall_clock_section

SCHEMA_VERSION = 1
"""Version of report.json: it grows when a figure changes its name or its meaning, not when one is added."""
Checkpoint = Callable[[], object]


def write_report(
    output: str,
    folder: Location | None = None,
    *,
    ending: Start | None = None,
    checkpoint: Checkpoint = lambda: None,
    figures: RunFigures | None = None,
) -> dict[str, Any]:
    """Write report.json, report.md and report.html into a run folder (a path or URI), each whole or not at all.

    Returns the report; its arguments are those of `build_report`. The run may still be going. Raises ValueError if the
    folder holds no run or a damaged one.
    """
    location = folder or resolve(output)
    report = build_report(output, location, ending=ending, checkpoint=checkpoint, figures=figures)
    page = to_html(report)
    checkpoint()
    write_bytes(report_file(location, "json"), to_json(report))
    write_bytes(report_file(location, "md"), to_markdown(report).encode())
    write_bytes(report_file(location, "html"), page.encode(errors="backslashreplace"))
    return report


def to_json(values: dict[str, Any]) -> bytes:
    """Encode values as JSON in UTF-8. Half of a surrogate pair, which UTF-8 does not have, becomes a JSON escape."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def build_report(
    output: str,
    folder: Location | None = None,
    *,
    ending: Start | None = None,
    checkpoint: Checkpoint = lambda: None,
    figures: RunFigures | None = None,
) -> dict[str, Any]:
    """Build the report of a run folder as JSON values: seconds, tokens, shares (0 to 1); null if there is no value.

    The run may still be going. folder: the location of `output`, if it is open already. ending: a start whose record in
    the folder does not say yet how it ends. checkpoint: called between tables; may raise. figures: of all rows, if they
    were read already. Raises ValueError if the folder holds no run or a damaged one.
    """
    location = folder or resolve(output)
    figures, source = (figures, "parts") if figures else _figures(Rows(location), checkpoint)
    done, errors = figures.done, figures.errors
    manifest = read_manifest(location)
    documents = timed_documents(done.timed)
    audits = read_audits(location)
    beat = read_heartbeat(location)
    starts = timed_starts(_starts(location, ending), documents, beat, audit_seconds(audits))
    report = {
        "schema_version": SCHEMA_VERSION,
        "as_of": time_text(time.time()),
        "output": output,
        "source": source,
        "run": _run(manifest),
        "selection": None if manifest is None else manifest.get("selection"),
        "rows": _row_counts(manifest, done.num_rows, errors.num_rows),
        "wall_clock": wall_clock_section(starts, documents, _price([timed.start for timed in starts])),
        "starts": [start_section(timed) for timed in starts],
        "limits": limits_section(done.timed, [timed.start for timed in starts]),
        "tail": tail_section(starts),
        **done.report(),
        "errors": errors.report(),
        "audit": audit_figures(audits, _dtype(manifest)),
        "timeline": timeline_section(starts),
    }
    report = {name: _finite(value) for name, value in report.items()}
    return report | {"advice": give_advice(report)}


def read_report(output: str) -> dict[str, Any]:
    """Read the report that a run has written last; build one if there is none of this version. Raises ValueError."""
    location = resolve(output)
    try:
        report = json.loads(read_bytes(report_file(location, "json")) or b"null")
        if isinstance(report, dict) and report.get("schema_version") == SCHEMA_VERSION:
            return report
    except ValueError:
        return build_report(output, location)
    return build_report(output, location)


def _figures(rows: Rows, checkpoint: Checkpoint) -> tuple[RunFigures, str]:
    """Read every row; return the figures, and where the rows were."""
    figures = RunFigures()
    for is_done, table in rows.both(DONE_COLUMNS, ERROR_COLUMNS):
        checkpoint()
        figures.take(is_done, table)
    return figures, rows.source


def _run(manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """Select from the manifest what a reader of the figures must know."""
    if manifest is None:
        return None
    config = manifest["config"]
    sections = ("target", "draft", "decoding", "attention", "tree", "cache")
    named = {name: config.get(name) for name in sections}
    return {"fingerprint": manifest["fingerprint"], "models": models_of(manifest), **named}


def _dtype(manifest: dict[str, Any] | None) -> str:
    """Return the target's dtype; float32, the strictest, if it is not recorded."""
    target = {} if manifest is None else manifest["config"].get("target", {})
    return str(target.get("dtype", "float32"))


def _starts(output: Location, ending: Start | None) -> list[Start]:
    """Read every start of the run, oldest first; one of them may be about to end."""
    starts = read_starts(output)
    if ending is None:
        return starts
    return [ending if start.run_id == ending.run_id else start for start in starts]


def _price(starts: Sequence[Start]) -> float | None:
    """Return the price that the last start with one was given."""
    prices = [start.price_per_worker_hour for start in starts if start.price_per_worker_hour is not None]
    return prices[-1] if prices else None


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null, at any depth."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row_counts(manifest: dict[str, Any] | None, done: int, errors: int) -> dict[str, int | None]:
    """Return the rows by outcome."""
    rows = None if manifest is None else num_input_rows(manifest)
    pending = None if rows is None else rows - done - errors
    return {"input": rows, "done": done, "errors": errors, "pending": pending}
