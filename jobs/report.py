"""Report on a run folder: write report.json and report.md into it and print their tables.

    python jobs/report.py OUTPUT

Exits with 2 if the folder holds no run, and with 1 if stdout cannot be written.
"""

from __future__ import annotations

import argparse
import sys

from specextend.report import render, write_report
from specextend.terminal import complain, guard_streams


def main(arguments: list[str] | None = None) -> int:
    """Write and print the report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", help="output folder of a run: a path or a URI")
    options = parser.parse_args(arguments)
    try:
        report = write_report(options.output)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    try:
        print(render(report), end="", flush=True)
    except OSError as error:
        complain(OSError(f"stdout cannot be written: {error}; report.md has the tables"))
        return 1
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
