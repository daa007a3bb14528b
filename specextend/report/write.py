"""`report.json` and `report.md` in a run folder."""

from __future__ import annotations

import json
from typing import Any

from specextend.data.storage import resolve, write_bytes
from specextend.report.build import build_report
from specextend.report.render import to_markdown


def write_report(output: str) -> dict[str, Any]:
    """Write both files of the run folder `output` (a path or URI), each whole or not at all; returns the report.

    May be called at any time of a run. Raises ValueError for a folder that holds no run or a damaged one.
    """
    report = build_report(output)
    location = resolve(output)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(location.child("report.json"), text.encode())
    write_bytes(location.child("report.md"), to_markdown(report).encode())
    return report
