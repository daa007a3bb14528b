"""A run from its configuration to its exit code: checked, locked, planned, decoded, finalized."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from specextend.cluster.attempts import Attempt, version_changes
from specextend.cluster.cluster import claimed, connected, is_local, workers_that_fit
from specextend.cluster.display import Display
from specextend.cluster.driver import Committer, Driver
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_TOO_MANY_ERRORS,
    OtherRunError,
    RefusedError,
    StoreError,
    exit_code,
)
from specextend.cluster.interrupt import Interrupt
from specextend.cluster.leases import Limits
from specextend.cluster.lock import OutputLock, check_free
from specextend.cluster.messages import first_line
from specextend.cluster.metrics import Metrics
from specextend.cluster.output import writing
from specextend.cluster.plan import Plan, make_plan
from specextend.cluster.pool import Pool
from specextend.cluster.prepare import Prepared, prepare
from specextend.cluster.progress import Ledger
from specextend.cluster.roster import Roster
from specextend.cluster.scheduler import Scheduler
from specextend.cluster.worker import EngineFactory
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.documents import InputError, Source
from specextend.data.finalize import Counts, finalize, is_finalized, read_success, remove_success, write_success
from specextend.data.fingerprint import differences, read_manifest, write_manifest
from specextend.data.inputs import InputUnreachableError
from specextend.data.parts import PartWriter, Progress, pending, read_parts
from specextend.data.regroup import regroup
from specextend.data.storage import Location, remove_temporary_files
from specextend.loading import load_engine

FORCED = "ended by force; what was committed is there, run again to resume"
EXTRA_LEASES = 2
"""Leases that wait at a worker beside those that decode."""


def check_same_run(prepared: Prepared) -> bool:
    """Whether the output folder holds this run already. Raises OtherRunError where it holds another."""
    try:
        recorded = read_manifest(prepared.output)
    except ValueError as error:
        raise OtherRunError(str(error)) from error
    if recorded is None:
        return False
    if lines := differences(recorded, prepared.manifest):
        raise OtherRunError(f"{prepared.output.path} belongs to another run:\n  " + "\n  ".join(lines))
    return True


def read_progress(output: Location) -> Progress:
    """What the parts hold. Raises RefusedError for a damaged one."""
    try:
        return read_parts(output)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def run(
    config: RunConfig,
    display: Display,
    interrupt: Interrupt,
    *,
    retry_errors: bool = False,
    report: Callable[[str], object] = lambda output: None,
    factory: EngineFactory = load_engine,
) -> int:
    """Run or resume a job; the exit code is 0 or 3.

    report: writes the run's report, given the output folder. factory: makes a worker's engine, on the worker.
    Raises RefusedError, LockHeldError, OtherRunError, OutputError, InterruptedRunError, and what ends a run unforeseen.
    """
    prepared = prepare(config)
    check_free(prepared.output)
    check_same_run(prepared)
    run_id = secrets.token_hex(4)
    with OutputLock(prepared.output, run_id) as lock:
        changes = version_changes(prepared.output)
        attempt = Attempt(prepared.output, run_id, config)

        def last() -> None:
            lock.release()
            display.note(f"the run did not stop within job.grace_s: {FORCED}", "run_ended", exit_code=EXIT_INTERRUPTED)
            attempt.end(EXIT_INTERRUPTED, FORCED)

        interrupt.last = last
        with writing(prepared.output):
            _sweep(prepared.output)
            attempt.begin()
        display.begin(run_id)
        display.event("run_started", host=socket.gethostname(), pid=os.getpid())
        for change in changes:
            display.note(f"warning: since the last start, {change}")
        try:
            code = _Start(prepared, lock, run_id, attempt, display, interrupt, report, factory).run(retry_errors)
        except BaseException as error:
            with suppress(OSError):  # where the disk is full that is what there is to tell, and `error` says it
                attempt.end(exit_code(error), first_line(error))
            display.event("run_ended", exit_code=exit_code(error), reason=first_line(error))
            raise
        with writing(prepared.output):
            attempt.end(code)
        display.event("run_ended", exit_code=code)
        interrupt.disarm()
        return code


def _sweep(output: Location) -> None:
    """Remove what drivers that were killed while they wrote have left beside the files of a run."""
    for folder in (output, output.child("_run"), output.child("_run", "attempts")):
        remove_temporary_files(folder)


@dataclass(slots=True)
class _Start:
    """One start of a run, which holds the output folder."""

    prepared: Prepared
    lock: OutputLock
    run_id: str
    attempt: Attempt
    display: Display
    interrupt: Interrupt
    report: Callable[[str], object]
    factory: EngineFactory

    def run(self, retry_errors: bool) -> int:
        """Decode what is left to do, then finalize.

        Raises RefusedError for an input that breaks off or changes, StoreError for one that is out of reach.
        """
        try:
            return self._run(retry_errors)
        except InputUnreachableError as error:
            raise StoreError(f"{error}; what is done is kept") from error
        except InputError as error:
            raise RefusedError(str(error)) from error

    def _run(self, retry_errors: bool) -> int:
        output = self.prepared.output
        is_begun = check_same_run(self.prepared)
        progress = read_progress(output)
        rows = [file.num_rows for file in self.prepared.source.files]
        keys = set(pending(rows, progress, retry_errors=retry_errors))
        counts = read_success(output)
        if not keys and counts is not None and self._accepts(counts) and is_finalized(self.prepared.source, output):
            self.display.note(f"complete already, {_say(counts)}")
            return EXIT_DONE
        work = self._read_through(keys) if keys else None
        with writing(output):
            if not is_begun:
                write_manifest(output, self.prepared.manifest)
            remove_success(output)
        if work is not None:
            num_errors = len(progress.errors.keys() - keys)
            self._decode(*work, Ledger(work[1].estimates, len(progress.done), num_errors))
        self.interrupt.check()
        with writing(output):
            return self._conclude(finalize(self.prepared.source, output))

    def _conclude(self, counts: Counts) -> int:
        """The report, and `_SUCCESS` last, or not at all."""
        output = self.prepared.output
        self.report(self.prepared.config.output.path)
        self.display.note(_say(counts))
        if not self._accepts(counts):
            share = self.prepared.config.job.max_error_fraction
            self.display.note(
                f"exit {EXIT_TOO_MANY_ERRORS}, no _SUCCESS: job.max_error_fraction {share:g} allows "
                f"{int(share * counts.rows)} failed rows; see errors/, --retry-errors does those rows again"
            )
            return EXIT_TOO_MANY_ERRORS
        write_success(output, counts)
        return EXIT_DONE

    def _accepts(self, counts: Counts) -> bool:
        return counts.errors <= self.prepared.config.job.max_error_fraction * counts.rows

    def _decode(self, source: Source, plan: Plan, ledger: Ledger) -> None:
        try:
            with connected(), claimed(self.prepared.output.path):
                self.interrupt.install()
                self._say_what_fits()
                driver = self._driver(source, plan, ledger)
                try:
                    driver.run()
                finally:
                    driver.pool.close()
        finally:
            self.interrupt.install()  # ray.shutdown() has taken the handler of SIGTERM away

    def _say_what_fits(self) -> None:
        job = self.prepared.config.job
        if is_local() and (fit := workers_that_fit(job)) < job.workers:
            self.display.note(f"warning: this machine has room for {fit} of {job.workers} workers (job.workers)")

    def _read_through(self, keys: set[DocumentKey]) -> tuple[Source, Plan]:
        """Where to read documents from, and what there is to do. Raises InputError for a file that breaks off."""
        with writing(self.prepared.output):
            source = regroup(self.prepared.source, self.prepared.output)
        return source, self._plan(source, keys)

    def _plan(self, source: Source, keys: set[DocumentKey]) -> Plan:
        decoding = self.prepared.config.decoding
        begin = time.monotonic()
        plan = make_plan(
            source, self.prepared.prompts, keys, decoding.max_new_tokens, decoding.seed, self.interrupt.check
        )
        self.display.note(
            f"{len(keys)} of {source.num_rows} rows to do, about {plan.num_prompt_tokens():,} prompt tokens "
            f"(planned in {time.monotonic() - begin:.1f} s)"
        )
        return plan

    def _driver(self, source: Source, plan: Plan, ledger: Ledger) -> Driver:
        config, job = self.prepared.config, self.prepared.config.job
        limits = Limits(
            max_attempts=job.max_attempts,
            deadline_base_s=job.deadline_base_s,
            deadline_s_per_token=job.deadline_s_per_token,
            stall_s=job.stall_s,
        )
        num_leases = config.decoding.max_batch_size + EXTRA_LEASES
        output = self.prepared.output
        writer = PartWriter(output, self.run_id)
        return Driver(
            scheduler=Scheduler(plan.work(), limits, num_leases, f"{self.run_id}-"),
            pool=Pool(config, source, self.factory, num_leases),
            roster=Roster(job.workers),
            committer=Committer(output, writer, self.lock, job.commit_every_rows, job.commit_every_s),
            ledger=ledger,
            display=self.display,
            metrics=Metrics(self.run_id),
            interrupt=self.interrupt,
            attempt=self.attempt,
            source=source,
            job=job,
        )


def _say(counts: Counts) -> str:
    return f"{counts.rows} rows: {counts.done} done, {counts.errors} failed"
