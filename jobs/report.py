"""Report on a run folder: writes report.json and report.md into it and prints their tables.

    python jobs/report.py OUTPUT

Exit code 2 for a folder that holds no run.
"""

from __future__ import annotations

import argparse
import sys

from specextend.report import render, write_report


def main(arguments: list[str] | None = None) -> int:
    """Write and print the report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", help="output folder of a run: a path or a URI")
    options = parser.parse_args(arguments)
    try:
        report = write_report(options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(render(report), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
