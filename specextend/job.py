"""Runs called from Python, for notebooks and orchestrators: `specextend.run`."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from specextend.cluster.environment import prepare_environment
from specextend.cluster.exits import EXIT_INTERRUPTED, Interrupt, InterruptedRunError, RefusedError
from specextend.cluster.progress import Display, open_display
from specextend.config import Configs, RunConfig
from specextend.core import ReadOnly, Values
from specextend.data.run_folder import Retry
from specextend.folders import die

_ONE_RUN = threading.Lock()
"""A process has a single Ray and a single stderr."""


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run."""

    exit_code: int
    """0: done; 3: more failed rows than `job.max_error_fraction` allows; 75: cancelled, call
    again.
    """
    output: str
    """Folder of the run."""
    report: ReadOnly | None = field(repr=False)
    """Contents of report.json; None if the run was cancelled before it began."""

    @property
    def summaries(self) -> str:
        """Return the folder of Parquet files with summaries. Missing if there was nothing to do."""
        return f"{self.output}/summaries"

    @property
    def errors(self) -> str:
        """Return the folder of Parquet files with failed rows."""
        return f"{self.output}/errors"

    @property
    def page(self) -> str:
        """Return the path of the HTML report."""
        return f"{self.output}/report.html"

    @property
    def rows(self) -> Mapping[str, int | None]:
        """Return row counts by outcome: `input`, `done`, `errors` and `pending`."""
        return {} if self.report is None else self.report["rows"]


def run(
    config: Configs,
    *,
    input: str | Path | None = None,  # noqa: A002 - as on the command line
    output: str | Path | None = None,
    settings: ReadOnly | None = None,
    run_date: date | None = None,
    retry_errors: Retry = "none",
    redo: str | None = None,
    redo_as: str | None = None,
    cancel: threading.Event | None = None,
    progress: bool = True,
) -> RunResult:
    """Run or resume a job in this process, from any thread.

    Args:
        config: A YAML file, the name of a shipped configuration, a dictionary of values, or a
            RunConfig; or a list of these, such as a pair and a task.
        input: Overrides `input.path`.
        output: Overrides `output.path`.
        settings: Overrides of other keys, such as `{"job.workers": 2}`.
        run_date, retry_errors, redo, redo_as: As on the command line.
        cancel: Event to stop the run. Finished work is committed; the exit code is 75, as on
            Ctrl-C.
        progress: Show the progress on stderr.

    Raises:
        ValueError: Something must be changed before the run can work.
        RunError: The run failed; a later call may succeed.
    """
    paths = {"input.path": input, "output.path": output}
    values: Values = {key: str(path) for key, path in paths.items() if path is not None}
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in (values | dict(settings or {})).items()
    ]
    loaded = RunConfig.load(config, overrides, run_date=run_date)
    if not _ONE_RUN.acquire(blocking=False):
        raise RefusedError(
            "specextend.run is active in another thread; wait for its end, or use another process"
        )
    with ExitStack() as stack:
        stack.callback(_ONE_RUN.release)
        _prepare_environment()
        cancel = cancel or threading.Event()
        interrupt = stack.enter_context(_cancelled_by(cancel, loaded.job.deadline_s))
        # Ray reads the environment when it is imported
        from specextend.cluster import checks
        from specextend.cluster.lifecycle import run_job

        loaded = checks.redo(loaded, redo, redo_as)
        with closing(open_display() if progress else Display(lambda line: None)) as display:
            try:
                code = run_job(loaded, display, interrupt, retry_errors=retry_errors)
            except InterruptedRunError:
                code = EXIT_INTERRUPTED
    folder = loaded.output.path
    return RunResult(code, folder, _report(folder, is_over=code != EXIT_INTERRUPTED))


def _prepare_environment() -> None:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return
    if (
        ray is not None
        and "RAY_AUTH_MODE" not in os.environ
        and os.environ.get("RAY_ADDRESS", "local") == "local"
    ):
        raise RefusedError(
            "ray was imported before specextend.run could make its Ray private: import it after "
            "the first run, or call ray.init() first to use that Ray"
        )
    prepare_environment(os.environ)


def _report(output: str, *, is_over: bool) -> ReadOnly | None:
    from specextend.report import build_report, read_report  # it imports pyarrow

    if is_over:
        return read_report(output)
    with suppress(ValueError):  # no run yet
        return build_report(output)
    return None


class _Cancel(Interrupt):
    """Stop requests within a user's process, which never end it."""

    def __init__(self, event: threading.Event, deadline_s: float):
        super().__init__(grace_s=threading.TIMEOUT_MAX, deadline_s=deadline_s)
        self._event = event
        before = signal.getsignal(signal.SIGTERM)
        self._terminate = die if before is signal.SIG_DFL else before

    def install(self) -> None:
        """Handle Ctrl-C, and restore the user's SIGTERM handler, which Ray replaces."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._terminate)

    def check(self) -> None:
        """Raise InterruptedRunError if told to stop."""
        if self._event.is_set():
            self.tell("cancelled")
        super().check()


@contextmanager
def _cancelled_by(event: threading.Event, deadline_s: float) -> Iterator[Interrupt]:
    interrupt = _Cancel(event, deadline_s)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    streams = (sys.stdout, sys.stderr)
    interrupt.install()
    try:
        yield interrupt
    finally:
        interrupt.disarm()
        sys.stdout, sys.stderr = streams
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
