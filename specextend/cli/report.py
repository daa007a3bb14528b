"""Report on a run folder: write report.json and report.html into it and print their tables.

    python jobs/report.py OUTPUT
    python jobs/report.py OUTPUT --against OTHER

With --against it writes nothing and prints how two runs differ: figures, texts, configuration.

Exits with 2 if a folder holds no run, and with 1 if stdout cannot be written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from specextend.terminal import complain


def main(argv: Sequence[str]) -> int:
    """Write and print the report, or print a comparison. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", help="output folder of a run: a path or a URI")
    parser.add_argument("--against", metavar="OTHER", help="compare with another run's folder; write nothing")
    options = parser.parse_args(argv)
    try:
        text = _text(options)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    try:
        print(text, end="", flush=True)
    except OSError as error:
        complain(OSError(f"stdout cannot be written: {error}; report.html has the tables of a report"))
        return 1
    return 0


def _text(options: argparse.Namespace) -> str:
    """Return what to print. Raises ValueError and OSError."""
    from specextend.report import compare, render, render_comparison, write_report  # seconds: not for --help

    if options.against is not None:
        return render_comparison(compare(options.output, options.against))
    return render(write_report(options.output))
