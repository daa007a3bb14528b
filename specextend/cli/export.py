"""Write the results of a run as JSON Lines in the output format of OpenAI's Batch API.

    python jobs/export.py OUTPUT --to results.jsonl

Exits with 2 if the folder holds no run, or the file cannot be written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from specextend.core import counted, printable
from specextend.terminal import complain


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", help="output folder of a run: a path or a URI")
    parser.add_argument("--to", required=True, metavar="FILE", help="the file to write, a path or a URI")
    options = parser.parse_args(argv)
    from specextend.data.storage import resolve
    from specextend.report.rows import write_responses  # seconds: not for --help

    try:
        written, errors, rows = write_responses(resolve(options.output), resolve(options.to))
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    what = counted(written, "document") if rows is None else f"{written:,} of {counted(rows, 'document')}"
    print(printable(f"{what} in {options.to}, {errors:,} of them as errors"))
    return 0
