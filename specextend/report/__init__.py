"""The report of a run folder: counts, speeds, and shares of the time."""

from specextend.report.build import build_report, write_report
from specextend.report.sections import render

__all__ = ["build_report", "render", "write_report"]
