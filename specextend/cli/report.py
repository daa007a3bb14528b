"""The commands `report`, `compare`, `audit` and `export`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from specextend.cli.command import JSON, OUTPUT, in_one_line, show, show_found
from specextend.core import Values, counted, first_line, printable

if TYPE_CHECKING:  # it imports pyarrow
    from specextend.data.storage import Location
    from specextend.report.export import Exported, Form

EXIT_OVER_LIMIT = 3


@click.command()
@OUTPUT
@click.option(
    "--reviewed",
    metavar="FILE",
    help="a sample of `export --sample` with verdicts: how many answers are good, and how often "
    "flags are right",
)
@JSON
@in_one_line
def report(output: str, reviewed: str | None, json: str | None) -> int:
    """Print the report of a run.

    If you may write into the folder of the run, the report is also written there, as report.json
    and report.html.
    """
    from specextend import report as reports  # seconds: not for --help

    lost = None if reviewed else reports.reviewed_file(output)
    try:
        found = reports.write_report(output, reviewed=reviewed)
        if lost:
            note = f"note: the review of {lost} is not in the report now; --reviewed keeps it"
            click.echo(printable(note), err=True)
    except OSError as error:
        # fails again unless only writing failed
        found = reports.build_report(output, reviewed=reviewed)
        why = error.strerror or first_line(error)
        click.echo(
            printable(f"note: report.json and report.html cannot be written into {output}: {why}"),
            err=True,
        )
    show_found(reports.render(found), json, found)
    return 0


@click.command()
@OUTPUT
@click.argument("other", type=click.Path())
@JSON
@click.option(
    "--max-differing",
    type=click.FloatRange(0, 1),
    help="exit 3 if a larger share of the common texts differs",
)
@click.option(
    "--max-slower",
    type=click.FloatRange(0, 1),
    help="exit 3 if OUTPUT's workers are slower by more",
)
@in_one_line
def compare(
    output: str, other: str, json: str | None, max_differing: float | None, max_slower: float | None
) -> int:
    """Compare OUTPUT, the candidate, with OTHER, the baseline: figures, texts, configuration.

    Nothing is written into their folders. The exit code is 3 if the candidate exceeds a limit.
    """
    from specextend.report import compare, render_comparison

    found = compare(output, other)
    show_found(render_comparison(found), json, found)
    if max_differing is None and max_slower is None:
        return 0
    over = over_limits(found, max_differing, max_slower)
    texts = found["texts"]
    if others := texts["only_here"] + texts["only_there"]:
        in_both = counted(texts["common"], "document")
        click.echo(f"note: {in_both} in both runs, {others:,} in only one", err=True)
    for line in over:
        click.echo(printable(line), err=True)
    return EXIT_OVER_LIMIT if over else 0


def over_limits(found: Values, max_differing: float | None, max_slower: float | None) -> list[str]:
    """Describe each exceeded limit in a line. Raises ValueError without common documents."""
    texts, (candidate, baseline) = found["texts"], found["outputs"]
    differing = texts["differing"]
    common = texts["common"]
    lines = []
    if not common:
        raise ValueError(
            f"nothing to compare: {candidate} and {baseline} have no finished document in common"
        )
    if max_differing is not None and (share := differing / common) > max_differing:
        of = f"{differing:,} of the {counted(common, 'document')} that both have done"
        lines.append(
            f"--max-differing {max_differing:g}: {share:.2g} of the texts of the candidate "
            f"{candidate} differ from those of the baseline {baseline} ({of})"
        )
    here, there = found["figures"]["output tokens per second of a worker"]
    if max_slower is None:
        return lines
    if not here or not there:
        unknown = baseline if here else candidate
        lines.append(f"--max-slower {max_slower:g}: the speed of {unknown} is not known")
    elif (share := 1 - here / there) > max_slower:
        lines.append(
            f"--max-slower {max_slower:g}: a worker of the candidate {candidate} is slower by "
            f"{share:.2g} than one of "
            f"the baseline {baseline} ({here:.1f} and {there:.1f} output tokens a second at work)"
        )
    return lines


@click.command()
@OUTPUT
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="most rows to decode again",
)
@click.option("--seed", type=int, default=0, show_default=True, help="another sample of the rows")
@JSON
@in_one_line
def audit(output: str, rows: int, seed: int, json: str | None) -> int:
    """Decode finished rows again on this machine, with a draft and without, and compare texts and
    speed.

    Each side decodes the rows four times, in turns. The result is in audit.json of the run's
    folder, and in the report. The exit code is 3 if a row fails or differs by more than rounding.
    """
    from specextend.cluster.audit import audit
    from specextend.data.run_folder import write_audit
    from specextend.data.storage import resolve
    from specextend.report import render_audit

    found = audit(output, rows, seed)
    show_found(render_audit(found), json, found)
    write_audit(resolve(output), found)
    return EXIT_OVER_LIMIT if found["different"] or found["failed"] else 0


_DEST = "a file that ends in .jsonl, .csv or .parquet, or a folder for such files; a path or a URI"
_FORMAT = (
    "instead of what DEST ends in; parquet for a folder. openai: JSON Lines in the output "
    "format of its Batch API"
)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option("--to", required=True, metavar="DEST", help=_DEST)
@click.option(
    "kind", "--format", type=click.Choice(["jsonl", "csv", "parquet", "openai"]), help=_FORMAT
)
@click.option(
    "--follow",
    is_flag=True,
    help="add the answers to the folder DEST as they come, until the run has ended",
)
@click.option(
    "--replace",
    is_flag=True,
    help="write DEST anew if it is a file that is there, whole or not at all",
)
@click.option(
    "--latest",
    is_flag=True,
    help="merge runs, or those that globs find: the newest answer to each id",
)
@click.option(
    "--only-ids-in",
    metavar="INPUT",
    help="leave out documents that are gone from this file, folder or glob",
)
@click.option(
    "--columns", default="", metavar="NAME,...", help="only these, in this order; all if not given"
)
@click.option(
    "--sample",
    metavar="N",
    type=click.IntRange(min=1),
    help="only N answers, drawn for people to judge, with an empty column verdict",
)
@click.option(
    "--by",
    type=click.Choice(["flags"]),
    help="of --sample: some answers with each flag and rule, and some without",
)
@click.option(
    "is_safe",
    "--spreadsheet-safe",
    is_flag=True,
    help="CSV: put ' before cells that begin like a formula",
)
@in_one_line
def export(
    runs: tuple[str, ...],
    to: str,
    kind: str | None,
    follow: bool,
    replace: bool,
    latest: bool,
    only_ids_in: str | None,
    columns: str,
    sample: int | None,
    by: str | None,
    is_safe: bool,
) -> int:
    """Write the answers of a run for other programs, or of several runs the newest answers.

    \b
    specextend export out/run --columns doc_id,summary --to answers.csv
    specextend export out/run --to answers/          # Parquet that load_dataset("answers") reads
    specextend export out/run --follow --to live/    # while the run goes on
    specextend export --latest 's3://bucket/nights/*' --to answers.parquet --replace
    specextend export out/run --sample 50 --by flags --to review.csv   # for people to judge
    """
    from specextend.data.storage import resolve
    from specextend.report.export import export_answers, find_runs

    if len(runs) > 1 and not latest:
        raise click.UsageError("several RUNs need --latest")
    outputs = find_runs(runs) if latest else [resolve(run) for run in runs]
    output = outputs[0]
    place = resolve(to)
    form = _form(to, place, kind, columns, is_safe)
    several = bool(latest or only_ids_in)
    if by and not sample:
        raise click.UsageError("--by says how --sample draws: give --sample, too")
    if (follow and (replace or several)) or (kind == "openai" and (columns or follow or several)):
        raise click.UsageError(
            "--follow and --format openai are for one run, without other options"
        )
    if follow or kind == "openai":
        _check_not_redone(output)
    if sample:
        if follow or several:
            raise click.UsageError("--sample draws from one run, without --follow or --latest")
        return _draw(runs[0], to, form, sample, by, replace)
    if kind == "openai":
        return _write_responses(output, place, to, replace)
    if follow:
        return _follow(output, place, form, to)
    show(_say(export_answers(outputs, place, form, only_ids_in, replace), to))
    return 0


def _form(to: str, place: Location, kind: str | None, columns: str, is_safe: bool) -> Form:
    from specextend.report.export import Form, format_of

    ending = format_of(place)
    form = Form(kind or ending or "parquet", columns.split(",") if columns else [], is_safe)
    if kind != "openai" and "." in place.name and not ending and not to.endswith("/"):
        raise click.UsageError(
            f"no file that is written ends as {to} does, only .csv, .jsonl and .parquet; let the "
            "name of a folder end in /"
        )
    if is_safe and form.kind != "csv":
        raise click.UsageError("--spreadsheet-safe is for CSV")
    return form


def _check_not_redone(output: Location) -> None:
    from specextend.data.run_folder import REDONE, inner_runs

    if inner_runs(output, REDONE):
        raise click.UsageError(
            "--follow and --format openai do not know rows that were done again, as some of this "
            "run were: export to .jsonl"
        )


def _draw(run: str, to: str, form: Form, sample: int, by: str | None, replace: bool) -> int:
    from specextend.data.storage import resolve
    from specextend.report.export import format_of
    from specextend.report.review import draw_sample

    place = resolve(to)
    if form.kind not in ("csv", "parquet") or not format_of(place):
        raise click.UsageError("--sample writes a file that ends in .csv or .parquet")
    drawn, answers = draw_sample(
        resolve(run), place, form, sample, by_flags=bool(by), replaces=replace
    )
    of = f"{drawn:,} of {counted(answers, 'answer')}"
    told = f"write good or bad into verdict, then: specextend report {run} --reviewed {to}"
    show(printable(f"{of} in {to}; {told}"))
    return 0


def _write_responses(output: Location, place: Location, to: str, replace: bool) -> int:
    from specextend.report.export import check_place
    from specextend.report.result_rows import write_responses

    check_place([output], place, replace)
    written, errors, rows = write_responses(output, place)
    show(printable(f"{_of(written, rows)} in {to}, {errors:,} of them as errors"))
    return 0


def _follow(output: Location, folder: Location, form: Form, to: str) -> int:
    from specextend.cluster.exits import EXIT_INTERRUPTED
    from specextend.cluster.lock import read_lock
    from specextend.report.export import follow, format_of

    if format_of(folder):
        raise click.UsageError("--follow adds files: let DEST be a folder, and give --format")

    def is_running() -> bool:
        driver = read_lock(output)
        return driver is not None and driver.seems_alive(time.time())

    exported = follow(output, folder, form, is_running)
    show(_say(exported, to))
    if exported.done + exported.failed == exported.rows:
        return 0
    print("the run has stopped before its end; run it again, then this command", file=sys.stderr)
    return EXIT_INTERRUPTED


def _say(exported: Exported, to: str) -> str:
    parts = [f"{_of(exported.done, exported.rows)} in {to}"]
    if exported.failed:
        parts.append(f"{exported.failed:,} failed")
    if exported.partial:
        parts.append(f"{exported.partial:,} with a task that failed")
    if exported.outdated:
        parts.append(f"{exported.outdated:,} with an older answer, because a newer attempt failed")
    if exported.gone:
        parts.append(f"{exported.gone:,} left out, because the input has them no more")
    parts += [f"{run} has not ended, and these are the answers before it" for run in exported.open]
    if exported.difference:
        parts.append(f"the runs differ ({exported.difference})")
    return printable("; ".join(parts))


def _of(count: int, rows: int | None) -> str:
    return (
        counted(count, "document") if rows is None else f"{count:,} of {counted(rows, 'document')}"
    )
