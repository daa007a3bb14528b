"""Summarise a corpus: Parquet in, Parquet out, on Ray. See `--help`; docs/input-output.md lists the exit codes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specextend.cluster.environment import is_submitted, prepare_environment
from specextend.core import printable

if TYPE_CHECKING:  # it imports torch
    from specextend.config import RunConfig

SHOWN = 2
"""Summaries that a finished run prints."""


def main(argv: Sequence[str]) -> int:
    """Run the job. Returns the exit code of the process. Exits with 2 if the arguments are wrong."""
    _exit_when_told(75)  # until the run has begun there is nothing to save
    arguments = parse(argv)
    prepare_environment(os.environ)
    from specextend.cluster import exits  # torch and ray take seconds to import: not for --help

    try:
        return _job(arguments) if arguments.status is None else _status(arguments)
    except exits.RunError as error:
        is_list = isinstance(error, exits.OtherRunError)  # of differences, each of which is one line
        _say(f"error: {error}", "error", arguments, keep="\n" if is_list else "")
        return exits.exit_code(error)
    except exits.InterruptedRunError as error:
        _say(f"interrupted: {error}; finished work is on disk, run again to resume", "interrupted", arguments)
        return exits.exit_code(error)


def _exit_when_told(code: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os._exit(code))


def _job(arguments: argparse.Namespace) -> int:
    """Run, or only say what there is to do (`--dry-run`). Returns the exit code."""
    from specextend.cluster.display import open_display
    from specextend.cluster.exits import Interrupt, RefusedError
    from specextend.cluster.run import run
    from specextend.config import ConfigError, RunConfig
    from specextend.core import first_line
    from specextend.report import RunFigures, write_report

    try:
        config = RunConfig.load(
            arguments.config,
            overrides(arguments),
            allow_relative=not is_submitted(os.environ),
            run_date=arguments.run_date,
        )
    except ConfigError as error:
        raise RefusedError(str(error)) from error
    if arguments.dry_run:
        return _dry_run(config, arguments)
    interrupt = Interrupt(deadline_s=config.job.deadline_s)
    interrupt.install()
    display = open_display(log=arguments.log)
    figures = RunFigures()
    report = partial(write_report, figures=figures)
    retry = arguments.retry_errors
    try:
        code = run(config, display, interrupt, retry_errors=retry, report=report, observe=figures.add)
    finally:
        display.close()
    _exit_when_told(code)  # the run is over: what is left is to show it
    try:
        conclude(config.output.path)
    except (OSError, ValueError) as error:  # a store that is away by now, a stdout that takes no more
        _say(f"the run ended with {code}, but cannot be shown: {first_line(error)}", "note", arguments)
    return code


def _dry_run(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Do the dry run: say what there is to do, and how long it will take. Returns the exit code."""
    from specextend.cluster.dry_run import describe_dry_run, dry_run, parse_time
    from specextend.cluster.exits import Interrupt, RefusedError
    from specextend.cluster.forecast import calibrate
    from specextend.cluster.prepare import prepare

    try:
        by = None if arguments.by is None else parse_time(arguments.by, datetime.now().astimezone())
    except ValueError as error:
        raise RefusedError(str(error)) from error
    measure = None
    if arguments.calibrate is not None:
        told = partial(_say, event="calibration", arguments=arguments)
        interrupt = Interrupt()
        measure = partial(calibrate, num_documents=arguments.calibrate, interrupt=interrupt, say=told)
    plan = dry_run(prepare(config), retry_errors=arguments.retry_errors, by=by, calibrate=measure)
    _show(describe_dry_run(plan))
    if arguments.json:
        _write_json(arguments.json, plan)
    return 0


def conclude(output: str) -> None:
    """Print what people want to see of a finished run: what it did, where the rest is, and two summaries."""
    from specextend.data.fingerprint import text_column as name_of_texts
    from specextend.data.parquet import open_parquet, stream
    from specextend.data.run_folder import list_results, summaries_folder
    from specextend.data.storage import resolve
    from specextend.report import read_report, render_outcome

    shown = printable(output)
    print(render_outcome(read_report(output)), end="")
    print(f"summaries: {shown}/summaries\nreport: {shown}/report.html; python jobs/report.py {shown} prints it")
    folder, text_column = summaries_folder(resolve(output)), name_of_texts(resolve(output))
    tables = (stream(open_parquet(folder.child(name)), ["doc_id", text_column]) for name in list_results(folder))
    found = (row for each in tables for table in each for row in table.slice(0, SHOWN).to_pylist())
    for row in islice(found, SHOWN):
        print(f"\nSummary of {printable(row['doc_id'])}:\n{printable(row[text_column], keep=chr(10))}")


def _status(arguments: argparse.Namespace) -> int:
    """Print the status of the run in an output folder. Returns the exit code."""
    from specextend.cluster.exits import RefusedError, StoreError
    from specextend.cluster.records import describe_status, read_status
    from specextend.core import first_line
    from specextend.data.storage import resolve

    try:
        found = read_status(resolve(arguments.status))
    except ValueError as error:
        raise RefusedError(first_line(error)) from error
    except OSError as error:
        raise StoreError(f"--status {arguments.status} cannot be read: {first_line(error)}") from error
    _show(describe_status(found))
    return 0


def _show(text: str) -> None:
    """Print what was asked for. Raises OutputError if stdout takes no more."""
    from specextend.cluster.exits import OutputError

    try:
        print(text, flush=True)
    except OSError as error:
        raise OutputError(f"stdout cannot be written: {error}; make room and run the command again") from error


def _write_json(path: str, plan: dict[str, Any]) -> None:
    """Write the plan of `--json`. Raises RefusedError if the path cannot be written."""
    from specextend.cluster.exits import RefusedError

    try:
        Path(path).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"--json {path} cannot be written: {error}; name another file") from error


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Collect the values of the command line as `key.path=value`; --input and --output win over --set."""
    paths = {"input.path": arguments.input, "output.path": arguments.output}
    return arguments.set + [f"{key}={json.dumps(value)}" for key, value in paths.items() if value is not None]


def _say(line: str, event: str, arguments: argparse.Namespace, keep: str = "") -> None:
    """Write one line to stderr, if it takes it, because stdout is for results; `keep` as for `printable`."""
    from specextend.cluster.display import Forgiving, JsonDisplay

    stderr = Forgiving(sys.stderr)
    if arguments.log == "json":
        JsonDisplay(lambda text: print(text, file=stderr, flush=True)).note(line, event)
    else:
        print(printable(line, keep), file=stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. Exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(prog="summarize.py", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file of configs/")
    what.add_argument("--status", metavar="OUTPUT", help="say how far the run of this output folder is, and exit")
    parser.add_argument("--input", help="in place of input.path")
    parser.add_argument("--output", help="in place of output.path")
    parser.add_argument(
        "--run-date",
        type=_run_date,
        metavar="YYYY-MM-DD",
        help="what {run_date} in the paths of input and output stands for, today by default; a start that resumes a "
        "run after midnight needs it",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override one value")
    parser.add_argument("--dry-run", action="store_true", help="say what there is to do; write no output")
    parser.add_argument("--json", metavar="PATH", help="with --dry-run: write the plan there, too")
    parser.add_argument(
        "--calibrate", type=_documents, metavar="N", help="with --dry-run: decode N documents to measure the time"
    )
    parser.add_argument("--by", metavar="TIME", help="with --dry-run: say how many workers are done by then (HH:MM)")
    parser.add_argument("--log", choices=["text", "json"], default="text", help="json: one line an event on stderr")
    parser.add_argument(
        "--retry-errors",
        nargs="?",
        choices=["retryable", "all"],
        const="retryable",
        default="none",
        help="do those error rows again that another try may mend, and nothing else; =all: every error row",
    )
    arguments = parser.parse_args(argv)
    for name in ("json", "calibrate", "by"):
        if getattr(arguments, name) is not None and not arguments.dry_run:
            parser.error(f"--{name} goes with --dry-run")
    return arguments


def _run_date(text: str) -> date:
    """Read the date of `--run-date`. Raises ArgumentTypeError."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise argparse.ArgumentTypeError(f"a date such as 2026-11-23 is wanted, got {text!r}") from None


def _documents(text: str) -> int:
    """Read the number of `--calibrate`. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"at least 2 documents show how documents differ, got {text!r}")
    return int(text)


def end(code: int) -> None:
    """End the process with that code at once.

    Python's own exit takes a second, in which SIGTERM would change the code. It also waits for libraries whose store
    has never answered, and ends with another code if stdout is closed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
