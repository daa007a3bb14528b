"""The report of a run folder: counts, speeds, and where the time went."""

from specextend.report.build import build_report, write_report
from specextend.report.sections import render

__all__ = ["build_report", "render", "write_report"]
