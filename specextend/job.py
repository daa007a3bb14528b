"""A run as a call, for notebooks and orchestrators: `specextend.run`."""

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
from specextend.core import ReadOnly
from specextend.data.run_folder import Retry
from specextend.folders import die

_ONE_RUN = threading.Lock()
"""Held during a run: a process has one Ray, and one stderr for its progress."""


@dataclass(frozen=True)
class RunResult:
    """Say what a run has come to."""

    exit_code: int
    """0: done; 3: more rows failed than `job.max_error_fraction` allows; 75: cancelled, call again
    to resume.
    """
    output: str
    """The folder of the run."""
    report: ReadOnly | None = field(repr=False)
    """The contents of report.json; None if the run was cancelled before it had begun."""

    @property
    def summaries(self) -> str:
        """Return the folder of Parquet files with the summaries, which a run that had nothing to do
        does not have.
        """
        return f"{self.output}/summaries"

    @property
    def errors(self) -> str:
        """Return the folder of Parquet files with the rows that failed."""
        return f"{self.output}/errors"

    @property
    def page(self) -> str:
        """Return the file of the report as a page."""
        return f"{self.output}/report.html"

    @property
    def rows(self) -> Mapping[str, int | None]:
        """Return the rows by outcome: `input`, `done`, `errors` and `pending`."""
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
    redo_as: str = "again",
    cancel: threading.Event | None = None,
    progress: bool = True,
) -> RunResult:
    """Run or resume a job, in this process and any of its threads.

    config: a YAML file, the name of a shipped configuration, the values of one, or a RunConfig; or
    a list of these, such as a pair and a task. input, output, settings (`{"job.workers": 2}`),
    run_date, retry_errors, redo, redo_as: as on the command line. cancel: once it is set,
    finished work is committed and the run ends with exit code 75, as it does on Ctrl-C. progress:
    show it on stderr. Raises in one line what the command would say: ValueError for what must be
    changed, others for what may pass.
    """
    paths = {"input.path": input, "output.path": output}
    values = {key: str(path) for key, path in paths.items() if path is not None} | dict(
        settings or {}
    )
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    loaded = RunConfig.load(config, overrides, run_date=run_date)
    if not _ONE_RUN.acquire(blocking=False):
        raise RefusedError(
            "specextend.run goes on in another thread of this process; wait for its end, or start "
            "this run in another process"
        )
    with ExitStack() as stack:
        stack.callback(_ONE_RUN.release)
        _prepare_environment()
        interrupt = stack.enter_context(
            _cancelled_by(cancel or threading.Event(), loaded.job.deadline_s)
        )
        # it imports Ray, which reads the environment
        from specextend.cluster import checks
        from specextend.cluster.lifecycle import run_job

        if redo is not None:
            loaded = checks.redo(loaded, redo, redo_as)
        with closing(open_display() if progress else Display(lambda line: None)) as display:
            try:
                code = run_job(
                    loaded,
                    display,
                    interrupt,
                    retry_errors=retry_errors,
                )
            except InterruptedRunError:
                code = EXIT_INTERRUPTED
    return RunResult(
        code, loaded.output.path, _report(loaded.output.path, is_over=code != EXIT_INTERRUPTED)
    )


def _prepare_environment() -> None:
    """Set what a private Ray reads when it is imported. Raises RefusedError if it was imported
    without that.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return
    if (
        ray is not None
        and "RAY_AUTH_MODE" not in os.environ
        and os.environ.get("RAY_ADDRESS", "local") == "local"
    ):
        raise RefusedError(
            "ray was imported before specextend.run could keep its Ray to this user: import it "
            "after the first run, or call ray.init() before and the run takes that Ray"
        )
    prepare_environment(os.environ)


def _report(output: str, *, is_over: bool) -> ReadOnly | None:
    from specextend.report import build_report, read_report  # it imports torch

    if is_over:
        return read_report(output)
    with suppress(ValueError):  # there is no run yet
        return build_report(output)
    return None


class _Cancel(Interrupt):
    """Requests to stop a run inside somebody's process: an event or Ctrl-C. It never ends that
    process.
    """

    def __init__(self, event: threading.Event, deadline_s: float):
        super().__init__(grace_s=threading.TIMEOUT_MAX, deadline_s=deadline_s)
        self._event = event
        before = signal.getsignal(signal.SIGTERM)
        self._terminate = die if before is signal.SIG_DFL else before

    def install(self) -> None:
        """Listen to Ctrl-C, and take SIGTERM back from Ray for whom it belonged to."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._terminate)

    def check(self) -> None:
        """Raise InterruptedRunError once the event is set, too."""
        if self._event.is_set():
            self.tell("cancelled")
        super().check()


@contextmanager
def _cancelled_by(event: threading.Event, deadline_s: float) -> Iterator[Interrupt]:
    """Make the requests to stop; leave signal handlers and standard streams as they were."""
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
