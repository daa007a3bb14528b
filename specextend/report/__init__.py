"""The report of a run, and the comparison of two runs."""

from specextend.report.build import build_report, read_report, reviewed_file, write_report
from specextend.report.charts import RunFigures
from specextend.report.comparison import compare, render_comparison
from specextend.report.sections import render, render_audit, render_outcome

__all__ = [
    "RunFigures",
    "build_report",
    "compare",
    "read_report",
    "render",
    "render_audit",
    "render_comparison",
    "render_outcome",
    "reviewed_file",
    "write_report",
]
