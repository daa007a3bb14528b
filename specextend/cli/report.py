"""The commands `report`, `compare` and `export`: one run, two side by side, or its results in another format."""

from __future__ import annotations

from typing import Any

import click

from specextend.cli.command import OUTPUT, in_one_line, show, takes, write_json
from specextend.core import counted, first_line, printable

EXIT_OVER_LIMIT = 3
_OTHER = click.argument("other", type=click.Path())
_GATE = takes(
    click.option("--json", metavar="FILE", help="write the comparison there, too; -: print it in place of the tables"),
    click.option("--max-differing", type=click.FloatRange(0, 1), help="exit 3 if a larger share of the texts differs"),
    click.option("--max-slower", type=click.FloatRange(0, 1), help="exit 3 if a worker is slower by a larger share"),
)


@click.command()
@OUTPUT
@click.option("--against", metavar="OTHER", help="compare with another run's folder; write nothing")
@in_one_line
def report(output: str, against: str | None) -> int:
    """Print the report of a run.

    It is written into the run's folder, too, as report.json and report.html, if you may write there.
    """
    from specextend import report as reports  # seconds: not for --help

    if against is not None:
        show(reports.render_comparison(reports.compare(output, against)), end="")
        return 0
    try:
        found = reports.write_report(output)
    except OSError as error:
        found = reports.build_report(output)  # fails again if it was not the writing that failed
        why = error.strerror or first_line(error)
        click.echo(printable(f"note: report.json and report.html cannot be written into {output}: {why}"), err=True)
    show(reports.render(found), end="")
    return 0


@click.command()
@OUTPUT
@_OTHER
@_GATE
@in_one_line
def compare(output: str, other: str, json: str | None, max_differing: float | None, max_slower: float | None) -> int:
    """Compare a run with another: figures, texts, configuration.

    Nothing is written into their folders. With a limit the exit code says whether it is kept.
    """
    from specextend.report import compare, render_comparison

    found = compare(output, other)
    if json != "-":
        show(render_comparison(found), end="")
    if json is not None:
        write_json(json, found)
    limits = {"differing": max_differing, "slower": max_slower}
    is_over = any(limit is not None and _share(found, of) > limit for of, limit in limits.items())
    return EXIT_OVER_LIMIT if is_over else 0


def _share(comparison: dict[str, Any], of: str) -> float:
    """Return the share of the texts that differ, or by which a worker is slower; a share that is unknown is 1."""
    if of == "differing":
        texts = comparison["texts"]
        return texts["differing"] / texts["common"] if texts["common"] else 1.0
    here, there = comparison["figures"]["output tokens per second of a worker"]
    return 1.0 if here is None or not there else 1 - here / there


@click.command()
@OUTPUT
@click.option("--to", required=True, metavar="FILE", help="the file to write, a path or a URI")
@in_one_line
def export(output: str, to: str) -> int:
    """Write the results of a run as JSON Lines.

    They have the output format of OpenAI's Batch API.
    """
    from specextend.data.storage import resolve
    from specextend.report.result_rows import write_responses  # seconds: not for --help

    written, errors, rows = write_responses(resolve(output), resolve(to))
    what = counted(written, "document") if rows is None else f"{written:,} of {counted(rows, 'document')}"
    show(printable(f"{what} in {to}, {errors:,} of them as errors"))
    return 0
