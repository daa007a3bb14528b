"""What a run folder says of itself: counts, speeds, and where the time went."""

from specextend.report.build import build_report
from specextend.report.render import render
from specextend.report.write import write_report

__all__ = ["build_report", "render", "write_report"]
