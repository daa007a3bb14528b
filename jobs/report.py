"""Report on a run folder. See `--help`."""

from specextend.cli.command import script
from specextend.cli.report import report

if __name__ == "__main__":
    script(report)
