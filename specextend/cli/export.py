"""The command `export`: the results of a run in another format."""

from __future__ import annotations

from collections.abc import Sequence

import click

from specextend.cli.command import OUTPUT, call, in_one_line, show
from specextend.core import counted, printable


@click.command()
@OUTPUT
@click.option("--to", required=True, metavar="FILE", help="the file to write, a path or a URI")
@in_one_line
def export(output: str, to: str) -> int:
    """Write the results of a run as JSON Lines.

    They have the output format of OpenAI's Batch API.
    """
    from specextend.data.storage import resolve
    from specextend.report.rows import write_responses  # seconds: not for --help

    written, errors, rows = write_responses(resolve(output), resolve(to))
    what = counted(written, "document") if rows is None else f"{written:,} of {counted(rows, 'document')}"
    show(printable(f"{what} in {to}, {errors:,} of them as errors"))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run `jobs/export.py`. Returns the exit code."""
    return call(export, argv, "export.py")
