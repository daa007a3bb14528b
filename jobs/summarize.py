"""Summarise a corpus: Parquet in, Parquet out, on Ray. See `--help`, and the README for the exit codes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from specextend.cluster.environment import is_submitted, prepare_environment
from specextend.core import printable

for number in (signal.SIGTERM, signal.SIGINT):  # until the run has begun there is nothing to save
    signal.signal(number, lambda number, frame: os._exit(75))


def main(arguments: argparse.Namespace) -> int:
    """Run the job; the exit code of the process."""
    prepare_environment(os.environ)
    from specextend.cluster import exits  # torch and ray take seconds to import: not for --help

    try:
        return job(arguments) if arguments.status is None else status(arguments)
    except exits.SAID_IN_ONE_LINE as error:
        say(f"error: {error}", "error", arguments)
        return exits.exit_code(error)
    except exits.InterruptedRunError as error:
        say(f"interrupted: {error}; finished work is on disk, run again to resume", "interrupted", arguments)
        return exits.exit_code(error)


def job(arguments: argparse.Namespace) -> int:
    """Dry run or run."""
    from specextend.cluster.display import open_display
    from specextend.cluster.dry_run import describe_dry_run, dry_run
    from specextend.cluster.exits import RefusedError
    from specextend.cluster.interrupt import Interrupt
    from specextend.cluster.prepare import prepare
    from specextend.cluster.run import run
    from specextend.config import ConfigError, RunConfig
    from specextend.report import write_report

    try:
        config = RunConfig.load(arguments.config, overrides(arguments), allow_relative=not is_submitted(os.environ))
    except ConfigError as error:
        raise RefusedError(str(error)) from error
    if arguments.dry_run:
        plan = dry_run(prepare(config), retry_errors=arguments.retry_errors)
        print(printable(describe_dry_run(plan), keep="\n"))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        return 0
    interrupt = Interrupt(config.job.grace_s, config.job.deadline_s)
    interrupt.install()
    display = open_display(log=arguments.log)
    try:
        code = run(config, display, interrupt, retry_errors=arguments.retry_errors, report=write_report)
    finally:
        display.close()
    conclude(config.output.path)
    return code


def conclude(output: str) -> None:
    """What a person wants to see of a finished run: its tables, one summary, and where the rest is."""
    from specextend.data.finalize import is_output_file
    from specextend.data.parquet import open_parquet, stream
    from specextend.data.storage import list_files, resolve
    from specextend.report import build_report, render

    print(printable(render(build_report(output)), keep="\n"), end="")
    folder = resolve(output).child("summaries")
    names = (name for name in list_files(folder) if is_output_file(name))
    tables = (stream(open_parquet(folder.child(name)), ["doc_id", "summary"]) for name in names)
    if first := next((table.slice(0, 1).to_pylist() for each in tables for table in each if len(table)), None):
        print(f"\nSummary of {printable(first[0]['doc_id'])}:\n{printable(first[0]['summary'], keep=chr(10))}")
    print(f"\nsummaries: {output}/summaries\nreport: {output}/report.md")


def status(arguments: argparse.Namespace) -> int:
    """Say how far the run of an output folder is."""
    from specextend.cluster.exits import RefusedError
    from specextend.cluster.messages import first_line
    from specextend.cluster.status import describe_status, read_status
    from specextend.data.storage import resolve

    try:
        found = read_status(resolve(arguments.status))
    except (ValueError, OSError) as error:
        raise RefusedError(first_line(error)) from error
    print(describe_status(found))
    return 0


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Command line values as `key.path=value`; --input and --output win over --set."""
    paths = {"input.path": arguments.input, "output.path": arguments.output}
    return arguments.set + [f"{key}={json.dumps(value)}" for key, value in paths.items() if value is not None]


def say(line: str, event: str, arguments: argparse.Namespace) -> None:
    """To stderr: stdout is for results."""
    from specextend.cluster.display import JsonDisplay

    if arguments.log == "json":
        JsonDisplay(lambda text: print(text, file=sys.stderr, flush=True)).note(line, event)
    else:
        print(printable(line, keep="\n"), file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """The command line; wrong ones exit with 2."""
    parser = argparse.ArgumentParser(prog="summarize.py", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file of configs/")
    what.add_argument("--status", metavar="OUTPUT", help="say how far the run of this output folder is, and exit")
    parser.add_argument("--input", help="in place of input.path")
    parser.add_argument("--output", help="in place of output.path")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override one value")
    parser.add_argument("--dry-run", action="store_true", help="say what there is to do; load and write nothing")
    parser.add_argument("--json", metavar="PATH", help="with --dry-run: write the plan there, too")
    parser.add_argument("--log", choices=["text", "json"], default="text", help="json: one line an event on stderr")
    parser.add_argument("--retry-errors", action="store_true", help="do error rows again, and nothing else")
    arguments = parser.parse_args()
    if arguments.json and not arguments.dry_run:
        parser.error("--json goes with --dry-run")
    return arguments


def end(code: int) -> None:
    """End the process, also where a store has never answered the driver: libraries would wait for that at exit."""
    from specextend.cluster.arbiter import is_looking

    if is_looking():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    end(main(parse()))
