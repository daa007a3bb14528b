"""A run from its configuration to its exit code: check, lock, plan, decode, finalize.

Start with `run_job`.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specextend.cluster.backlog import RowSet
from specextend.cluster.checks import (
    CheckedRun,
    check_machine,
    check_retry,
    check_run,
    check_same_run,
    counts_of_ended,
    describe_selection,
    input_errors,
    needed_on_each_node,
    num_left_out,
    open_rows,
    say_left_out,
)
from specextend.cluster.driver import Driver
from specextend.cluster.environment import connected, say_room, settle_cores
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_TOO_MANY_ERRORS,
    GRACE_S,
    Interrupt,
    RunError,
    exit_code,
    reading,
    writing,
)
from specextend.cluster.lock import OutputLock, held
from specextend.cluster.messages import Tried, with_document
from specextend.cluster.progress import Display, Ledger, Metrics
from specextend.cluster.records import (
    Committer,
    StartRecord,
    ended_with_errors,
    rows_per_commit,
    say_failed,
    tried_before,
)
from specextend.cluster.scheduler import Scheduler
from specextend.cluster.worker import EngineFactory, checked_engine
from specextend.cluster.workers import Pool, Roster
from specextend.cluster.workload import Plan, make_plan, plan_memory, settle_batch_size
from specextend.config import RunConfig
from specextend.core import DocumentKey, Values, counted, first_line
from specextend.data.commits import CommitWriter, Earlier, Progress
from specextend.data.finalize import finalize, unfinished
from specextend.data.fingerprint import provenance, write_manifest
from specextend.data.inputs import DocumentError
from specextend.data.run_folder import (
    Counts,
    Retry,
    read_starts,
    read_success,
    remove_success,
    report_file,
    run_folders,
    write_success,
)
from specextend.data.selection import write_selection
from specextend.data.storage import exists, remove_temporary_files
from specextend.models.loading import load_engine
from specextend.report import RunFigures, write_report
from specextend.requests.tasks import failed_row

_REFUSED_ROWS = 4096
EXTRA_LEASES = 2
"""Leases queued at a worker beyond its batch, while many documents wait."""
FORCED = "ended by force; committed work is kept, run again to resume"


def run_job(
    config: RunConfig,
    display: Display,
    interrupt: Interrupt,
    *,
    retry_errors: Retry = "none",
    report: Callable[..., object] = write_report,
    factory: EngineFactory = load_engine,
    ray: AbstractContextManager[list[Any]] | None = None,
) -> int:
    """Run or resume a job and return the exit code, 0 or 3.

    Args:
        report: Replaces `write_report`.
        factory: Builds the engine, on the worker.
        ray: Connects to Ray, in place of `connected`.

    Raises:
        RunError: The run failed; its exit code says how.
        InterruptedRunError: The run was told to stop.
    """
    interrupt.last = lambda: display.note(
        f"interrupted: {interrupt.reason}; nothing was decoded, run again", "run_ended"
    )
    check_machine(config)
    checked = check_run(config, interrupt.check, retry_errors)
    interrupt.check()
    with reading(checked.output):
        if (counts := counts_of_ended(checked)) is not None:
            display.note(
                f"complete already, {_say(counts)}; files that determined its rows have changed"
            )
            interrupt.disarm()
            return EXIT_DONE
        check_retry(checked)
    lock = OutputLock(checked.output, secrets.token_hex(4))
    with held(lock, display.note, interrupt.check):
        with reading(checked.output):
            check_retry(checked)  # another driver may have begun a run meanwhile
        checked = replace(checked, output=checked.output.behind(lock.check))
        record = StartRecord(
            checked.output, lock.run_id, config, checked.models, took_over=lock.predecessor
        )
        ray = ray or connected(interrupt)
        locked = _LockedRun(checked, lock, record, display, interrupt, report, factory, ray)
        interrupt.last = locked.end_by_force
        return locked.finish()


@dataclass(slots=True)
class _LockedRun:
    checked: CheckedRun
    lock: OutputLock
    record: StartRecord
    display: Display
    interrupt: Interrupt
    report: Callable[..., object]
    factory: EngineFactory
    ray: AbstractContextManager[list[Any]]
    figures: RunFigures = field(default_factory=RunFigures)

    def finish(self) -> int:
        output = self.checked.output
        display = self.display
        host = socket.gethostname()
        display.event("run_started", run=self.lock.run_id, host=host, pid=os.getpid())
        with writing(output):
            for folder in run_folders(output):
                remove_temporary_files(folder)  # left by killed drivers
        code = self._complete()
        if code is None:
            with self._recorded(), input_errors():
                if (work := self._begin()) is not None:
                    with self._workers(*work) as driver:
                        driver.drive()
                with writing(output):
                    source = self.checked.source
                    code = self._conclude(
                        finalize(
                            source,
                            output,
                            self.interrupt.check,
                            self.figures.add,
                            self.figures.words,
                        )
                    )
        display.event("run_ended", exit_code=code)
        self.interrupt.disarm()
        return code

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        display = self.display
        with writing(self.checked.output):
            self.record.write()
        for note in self.checked.notes:
            display.note(note)
        if paths := needed_on_each_node(self.checked.config):
            display.note(f"each node needs the same files at {', '.join(paths)}")
        for note in describe_selection(self.checked.source):
            display.note(note, "selection")
        if self.checked.source.warning:
            display.note(f"warning: {self.checked.source.warning}")
        try:
            yield
        except BaseException as error:
            code = exit_code(error)
            reason = first_line(error)
            # the error already reports a full disk or a lost lock
            with suppress(OSError, RunError):
                self.record.end(code, reason)
            display.event("run_ended", exit_code=code, reason=reason)
            raise

    def end_by_force(self) -> None:
        self.lock.release()
        message = f"the run did not stop within {GRACE_S:g} s: {FORCED}"
        self.display.note(message, "run_ended", exit_code=EXIT_INTERRUPTED)
        self.record.end(EXIT_INTERRUPTED, FORCED)

    def _complete(self) -> int | None:
        output = self.checked.output
        with reading(output):
            is_done = read_success(output) is not None
            if not is_done and not ended_with_errors(read_starts(output)):
                return None
            if not all(exists(report_file(output, kind)) for kind in ("json", "html")):
                return None
            progress, keys = open_rows(self.checked)
            counts = Counts(self.checked.source.num_rows, len(progress.done), len(progress.errors))
            if keys or self._accepts(counts) != is_done:
                return None
            if stale := unfinished(self.checked.source, output):
                self.display.note(
                    f"missing or damaged in summaries or errors: {', '.join(stale)}; rewritten"
                )
                return None
        self.display.note(f"complete already, {_say(counts)}")
        if is_done:
            return EXIT_DONE
        self._say_too_many(counts, progress)
        return EXIT_TOO_MANY_ERRORS

    def _begin(self) -> tuple[Plan, Progress, Ledger] | None:
        output = self.checked.output
        source = self.checked.source
        with reading(output):
            is_begun = check_same_run(self.checked)
            progress, keys = open_rows(self.checked)
            for note in say_left_out(num_left_out(self.checked, progress)):
                self.display.note(note)
        plan = self._plan(keys) if keys else None
        with writing(output):
            if not is_begun:
                if self.checked.config.input.depends_on_runs:
                    write_selection(source, output)
                write_manifest(output, self.checked.manifest)
            remove_success(output)
        if plan is None:
            return None
        num_errors = sum(key not in keys for key in progress.errors) + len(plan.refused)
        if len(plan.refused):
            self._refuse(plan, progress)
        if not plan.estimates:
            return None
        draft = self.checked.config.active_draft
        ledger = Ledger(
            plan.estimates,
            len(progress.done),
            num_errors,
            progress.work,
            draft.kind if draft else None,
        )
        return plan, progress, ledger

    def _plan(self, keys: RowSet) -> Plan:
        checked = self.checked
        begin = time.monotonic()
        plan = make_plan(checked.source, checked.tasks, keys, self.interrupt.check)
        self.display.note(
            f"{len(keys):,} of {counted(checked.source.num_rows, 'row')} to do, "
            f"about {counted(plan.num_prompt_tokens(), 'prompt token')} (planned in "
            f"{time.monotonic() - begin:.1f} s)"
        )
        for line in plan.says_cut():
            self.display.note(f"warning: {line}", "documents_cut")
        return plan

    def _refuse(self, plan: Plan, progress: Progress) -> None:
        writer = self._commit_writer()
        for begin in range(0, len(plan.refused), _REFUSED_ROWS):
            rows: list[Values] = []
            for file, row in plan.refused[begin : begin + _REFUSED_ROWS].tolist():
                self.interrupt.check()
                key = DocumentKey(file, row)
                attempts = progress.attempts.get(key, 0) + 1
                error = self._refusal(key)
                say_failed(self.display, key, error, attempts)
                rows.append(failed_row(key, error, attempts, progress.kept.find(key)))
            with writing(self.checked.output):
                writer.commit(rows)

    def _refusal(self, key: DocumentKey) -> DocumentError:
        row = None
        try:
            row = self.checked.source.read(key)
            self.checked.tasks[0].prompts.room(
                row.max_new_tokens or self.checked.config.decoding.max_new_tokens
            )
        except DocumentError as error:
            return with_document(error, row)
        raise AssertionError(f"{self.checked.source.place(key)} was refused, but can be read")

    def _commit_writer(self) -> CommitWriter:
        output = self.checked.output
        manifest = self.checked.manifest
        with writing(output):
            origin = provenance(manifest, [self.record.start], [self.lock.run_id])
            return CommitWriter(output, self.lock.run_id, manifest["fingerprint"], origin)

    @contextmanager
    def _workers(self, plan: Plan, progress: Progress, ledger: Ledger) -> Iterator[Driver]:
        with reading(self.checked.output):
            tried = tried_before(self.checked.output, progress)
        config = settle_batch_size(self.checked.config, self.checked.facts, plan)
        self._plan_memory(config, plan)
        address = os.environ.get("RAY_ADDRESS", "auto")
        is_local = address == "local"
        self.display.note(
            "starting Ray on this machine" if is_local else f"connecting to Ray at {address}"
        )
        with self.ray as early:
            config = settle_cores(config)
            if warning := say_room(config.job):
                self.display.note(f"warning: {warning}")
            driver = self._driver(config, plan, ledger, tried, early, progress.kept.find)
            try:
                yield driver
            finally:
                driver.pool.close()
                self.record.workers_released()
                if doubt := ledger.doubt:
                    self.display.note(f"warning: {doubt}", "draft_doubted")

    def _plan_memory(self, config: RunConfig, plan: Plan) -> None:
        memory = plan_memory(config, self.checked.facts, plan)
        self.record.plan(memory)
        if cache := memory["cache"]:
            most = cache["max_batch_size"]
            longest, mean = (
                min(most, cache[f"{name}_sequences_that_fit"]) for name in ("longest", "mean")
            )
            sizes = memory["memory_gib"]
            self.display.note(
                f"a worker takes {sum(sizes.values()):.1f} GiB, with {sizes['target_cache']:.1f} "
                f"for the target's cache: room for {longest} of the longest documents, or {mean} "
                "of mean length"
            )

    def _driver(
        self,
        config: RunConfig,
        plan: Plan,
        ledger: Ledger,
        tried: Mapping[DocumentKey, Tried],
        early: list[Any],
        earlier: Callable[[DocumentKey], Earlier | None],
    ) -> Driver:
        source = self.checked.source
        output = self.checked.output
        job = config.job
        num_leases = config.decoding.batch_size + EXTRA_LEASES
        group_rows = [file.group_rows for file in source.files]
        writer = self._commit_writer()
        return Driver(
            scheduler=Scheduler(
                plan.estimates,
                job,
                num_leases,
                f"{self.lock.run_id}-",
                tried,
                group_rows,
                num_extra=EXTRA_LEASES,
            ),
            pool=Pool(
                config,
                source,
                partial(checked_engine, factory=self.factory, hashes=self.checked.hashes),
                early,
                earlier,
            ),
            roster=Roster(job.workers),
            committer=Committer(
                output,
                writer,
                self.record,
                self.lock,
                rows_per_commit(job.workers),
                job.commit_every_s,
            ),
            ledger=ledger,
            display=self.display,
            interrupt=self.interrupt,
            record=self.record,
            source=source,
            job=job,
            count=Metrics(self.lock.run_id, len(plan.refused)).count,
        )

    def _conclude(self, counts: Counts) -> int:
        """Write report, record and, on success, `_SUCCESS`. Only the report can be interrupted."""
        output = self.checked.output
        code = EXIT_DONE if self._accepts(counts) else EXIT_TOO_MANY_ERRORS
        self.interrupt.check()
        self.report(
            self.checked.config.output.path,
            output,
            ending=self.record.ending(code),
            checkpoint=self.interrupt.check,
            figures=self.figures,
        )
        self.display.note(_say(counts))
        if code == EXIT_TOO_MANY_ERRORS:
            self._say_too_many(counts, open_rows(self.checked)[0])
        self.lock.confirm()
        self.record.end(code)
        if code == EXIT_DONE:
            write_success(output, counts)
        return code

    def _say_too_many(self, counts: Counts, progress: Progress) -> None:
        share = self.checked.config.job.max_error_fraction
        allowed = counted(int(share * counts.rows), "failed row")
        num_retryable = len(progress.errors) - len(progress.final)
        where = ["errors/"] if len(progress.errors) > progress.num_partial else []
        where += ["the column tasks of summaries/"] if progress.num_partial else []
        hint = "--retry-errors does none of them again, --retry-errors=all does"
        if num_retryable:
            hint = f"--retry-errors does {num_retryable:,} of them again"
        self.display.note(
            f"exit {EXIT_TOO_MANY_ERRORS}, no _SUCCESS: job.max_error_fraction {share:g} allows "
            f"{allowed}; see {' and '.join(where)}, {hint}"
        )

    def _accepts(self, counts: Counts) -> bool:
        return counts.errors <= self.checked.config.job.max_error_fraction * counts.rows


def _say(counts: Counts) -> str:
    return f"{counted(counts.rows, 'row')}: {counts.done:,} done, {counts.errors:,} failed"
