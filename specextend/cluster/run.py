"""A run from its configuration to its exit code: check, lock, plan, decode, finalize."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from specextend.cluster.cluster import claimed, connected, say_no_node
from specextend.cluster.display import Display
from specextend.cluster.driver import Committer, Driver
from specextend.cluster.environment import is_local, say_room, worker_device, workers_that_fit
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TOO_MANY_ERRORS,
    Interrupt,
    LockGoneError,
    LockHeldError,
    OtherRunError,
    OutputError,
    RefusedError,
    StoreError,
    end_process,
    exit_code,
)
from specextend.cluster.forecast import Forecast, Outlook
from specextend.cluster.leases import Limits, Tried
from specextend.cluster.lock import OutputLock
from specextend.cluster.memory_plan import plan_memory
from specextend.cluster.metrics import Metrics
from specextend.cluster.planning import Plan, make_plan
from specextend.cluster.pool import Pool
from specextend.cluster.prepare import (
    Prepared,
    check_machine,
    check_same_run,
    prepare,
    read_progress,
    say_left_out,
)
from specextend.cluster.progress import Ledger, describe_duration
from specextend.cluster.rates import CostSample, find_rates, keep_rates, pair_key
from specextend.cluster.records import Attempt, describe_age, read_charges, version_changes
from specextend.cluster.roster import Roster
from specextend.cluster.scheduler import Scheduler
from specextend.cluster.stores import OutputGate, reading, using, writing
from specextend.cluster.worker import CheckedFactory, EngineFactory
from specextend.config import RunConfig
from specextend.core import DocumentKey, first_line
from specextend.data.audit_rows import AuditWriter
from specextend.data.finalize import finalize, is_finalized
from specextend.data.fingerprint import write_manifest
from specextend.data.inputs import InputError, InputUnreachableError
from specextend.data.parts import DamagedPartError, PartWriter, Progress, Retry, StrangePartError, pending
from specextend.data.provenance import provenance
from specextend.data.run_folder import (
    Counts,
    audits_folder,
    read_success,
    records_folder,
    remove_success,
    starts_folder,
    write_success,
)
from specextend.data.source import Source, regroup, remove_copies
from specextend.data.storage import Location, remove_temporary_files
from specextend.loading import load_engine

FORCED = "ended by force; what was committed is there, run again to resume"
EXTRA_LEASES = 2
"""Leases that wait at a worker in addition to those that it decodes."""


def tried_before(output: Location, progress: Progress) -> dict[DocumentKey, Tried]:
    """Find how often earlier starts have tried each document; attempts that ended in an error row are forgiven."""
    charges = read_charges(output)
    tried: dict[DocumentKey, Tried] = {}
    for key in (charges.keys() | progress.attempts.keys()) - progress.done:
        charged, forgiven = charges.get(key, Tried(0)), progress.attempts.get(key, 0)
        tried[key] = Tried(max(charged.attempts, forgiven), charged.struck, forgiven)
    return tried


def run(
    config: RunConfig,
    display: Display,
    interrupt: Interrupt,
    *,
    retry_errors: Retry = "none",
    report: Callable[..., object] = lambda output, folder, **options: None,
    factory: EngineFactory = load_engine,
) -> int:
    """Run or resume a job. Returns the exit code, 0 or 3.

    report: writes the run's report; takes what `write_report` takes. factory: makes a worker's engine, on the worker.
    Raises the exceptions of `exits.py`, and any that nobody foresaw. Ends the process if the output's store does not
    answer.
    """
    check_machine(config)
    prepared = prepare(config, interrupt.check)
    interrupt.check()
    gate = OutputGate(config.job.store_s, lambda: _give_up(config, display))
    prepared = replace(prepared, output=prepared.output.behind(gate))
    run_id = secrets.token_hex(4)
    try:
        with reading(prepared.output):
            check_same_run(prepared)
        with OutputLock(prepared.output, run_id, say=display.note, checkpoint=interrupt.check) as lock:
            gate.fence = lock
            attempt = Attempt(prepared.output, run_id, config, prepared.models, took_over=lock.predecessor)
            interrupt.last = _last(lock, attempt, display)
            locked = _LockedRun(prepared, lock, run_id, attempt, display, interrupt, report, factory)
            return locked.run_recorded(retry_errors)
    finally:
        gate.close()


def _give_up(config: RunConfig, display: Display) -> None:
    """End the process: the call for which it waits may never return, and cannot be stopped."""
    what = f"no answer from the store of {config.output.path}, or of the input, for {config.job.store_s:g} s"
    reason = f"{what}; what was committed is there, run again to resume"
    end_process(
        EXIT_FAILED,
        lambda: display.note(f"error: {reason}", "run_ended", exit_code=EXIT_FAILED, reason=reason),
    )


def _last(lock: OutputLock, attempt: Attempt, display: Display) -> Callable[[], None]:
    """Make the call that precedes the end of the process by force."""

    def last() -> None:
        lock.release()
        display.note(f"the run did not stop within job.grace_s: {FORCED}", "run_ended", exit_code=EXIT_INTERRUPTED)
        attempt.end(EXIT_INTERRUPTED, FORCED)

    return last


def _sweep(output: Location) -> None:
    """Remove the temporary files of drivers that were killed while they wrote."""
    for folder in (output, records_folder(output), starts_folder(output), audits_folder(output)):
        remove_temporary_files(folder)


@dataclass(slots=True)
class _LockedRun:
    """A run that holds its output folder, from its start to its exit code."""

    prepared: Prepared
    lock: OutputLock
    run_id: str
    attempt: Attempt
    display: Display
    interrupt: Interrupt
    report: Callable[..., object]
    factory: EngineFactory

    def run_recorded(self, retry_errors: Retry) -> int:
        """Do what `run` does, and record its beginning and its end."""
        output, display = self.prepared.output, self.display
        with writing(output):
            changes = version_changes(output)
            _sweep(output)
            self.attempt.begin()
        display.begin(self.run_id)
        display.event("run_started", host=socket.gethostname(), pid=os.getpid())
        for note in self.prepared.notes:
            display.note(note, "model_revision")
        for change in changes:
            display.note(f"warning: since the last start, {change}")
        if self.prepared.source.warning:
            display.note(f"warning: {self.prepared.source.warning}")
        try:
            code = self.run(retry_errors)
        except BaseException as error:
            self._record_failure(error)
            display.event("run_ended", exit_code=exit_code(error), reason=first_line(error))
            raise
        with writing(output):
            self.attempt.end(code)
        display.event("run_ended", exit_code=code)
        self.interrupt.disarm()
        return code

    def _record_failure(self, error: BaseException) -> None:
        """Record the error if the folder takes it; if the disk is full or the lock lost, `error` says so itself."""
        with suppress(OSError, OutputError, LockHeldError, LockGoneError), using(self.prepared.output):
            self.attempt.end(exit_code(error), first_line(error))

    def run(self, retry_errors: Retry) -> int:
        """Decode what is left to do, then finalize.

        Raises RefusedError for an input that breaks off or changes and for damaged parts, OtherRunError for parts of
        another run, StoreError for an input that is out of reach.
        """
        try:
            return self._run(retry_errors)
        except InputUnreachableError as error:
            raise StoreError(f"{error}; what is done is kept") from error
        except StrangePartError as error:
            raise OtherRunError(str(error)) from error
        except (InputError, DamagedPartError) as error:
            raise RefusedError(str(error)) from error

    def _run(self, retry_errors: Retry) -> int:
        output = self.prepared.output
        rows = [file.num_rows for file in self.prepared.source.files]
        with reading(output):
            is_begun = check_same_run(self.prepared)
            progress = read_progress(self.prepared)
            keys = set(pending(rows, progress, retry_errors=retry_errors))
            if retry_errors == "retryable" and progress.final:
                self.display.note(say_left_out(len(progress.final)))
            counts = read_success(output)
            if not keys and counts and self._accepts(counts) and is_finalized(self.prepared.source, output):
                self.display.note(f"complete already, {_say(counts)}")
                return EXIT_DONE
        work = self._read_through(keys) if keys else None
        with writing(output):
            if not is_begun:
                write_manifest(output, self.prepared.manifest)
            remove_success(output)
        if work is not None:
            num_errors = len(progress.errors.keys() - keys)
            with reading(output):
                tried = tried_before(output, progress)
            self._plan_memory(work[1])
            forecast = self._forecast(work[1])
            expected_s = None if forecast is None else forecast.seconds
            self._decode(*work, Ledger(work[1].estimates, len(progress.done), num_errors, expected_s), tried)
        with writing(output):
            return self._conclude(finalize(self.prepared.source, output, self._checkpoint))

    def _checkpoint(self) -> None:
        """Stop if told to, and note that there is progress. Called between the steps of long operations."""
        self.interrupt.check()
        self.prepared.output.touch()

    def _conclude(self, counts: Counts) -> int:
        """Write the report and then, if enough rows are done, `_SUCCESS`. Only the report can be interrupted."""
        output = self.prepared.output
        code = EXIT_DONE if self._accepts(counts) else EXIT_TOO_MANY_ERRORS
        self._checkpoint()
        remove_copies(output)
        self.report(
            self.prepared.config.output.path, output, ending=self.attempt.ending(code), checkpoint=self._checkpoint
        )
        self.display.note(_say(counts))
        if code == EXIT_TOO_MANY_ERRORS:
            share = self.prepared.config.job.max_error_fraction
            self.display.note(
                f"exit {EXIT_TOO_MANY_ERRORS}, no _SUCCESS: job.max_error_fraction {share:g} allows "
                f"{int(share * counts.rows)} failed rows; see errors/, --retry-errors does the retryable ones again"
            )
            return code
        self.lock.confirm()
        write_success(output, counts)
        return code

    def _accepts(self, counts: Counts) -> bool:
        return counts.errors <= self.prepared.config.job.max_error_fraction * counts.rows

    def _decode(self, source: Source, plan: Plan, ledger: Ledger, tried: Mapping[DocumentKey, Tried]) -> None:
        begin = time.monotonic()
        with connected(self.interrupt), claimed(self.prepared.output.path):
            self._say_what_fits()
            driver = self._driver(source, plan, ledger, tried)
            connect_s = time.monotonic() - begin
            try:
                driver.run()
            finally:
                driver.pool.close()
                self.attempt.workers_released()
        self._keep_rates(driver.costs, connect_s)

    def _plan_memory(self, plan: Plan) -> None:
        """Record what a worker will hold, and say it."""
        memory = plan_memory(self.prepared.config, self.prepared.facts, plan)
        self.attempt.plan(memory)
        if cache := memory["cache"]:
            fit = min(cache["max_batch_size"], cache["longest_sequences_that_fit"])
            sizes = memory["memory_gib"]
            self.display.note(
                f"a worker holds {sum(sizes.values()):.1f} GiB, {sizes['target_cache']:.1f} of them for the target's "
                f"cache, which takes {fit} of the longest documents at once"
            )

    def _forecast(self, plan: Plan) -> Forecast | None:
        """Record how long the open documents should take by rates that are kept; None if there are none."""
        config = self.prepared.config
        rates = find_rates(self._pair_key(), worker_device(config.job) if is_local() else None)
        if rates is None:
            return None
        workers = workers_that_fit(config.job) if is_local() else config.job.workers
        forecast = Outlook(plan.estimates.values(), rates, config.decoding.max_batch_size).lasts(workers)
        with writing(self.prepared.output):
            self.attempt.expect(asdict(forecast))
        low, high = describe_duration(forecast.seconds_low), describe_duration(forecast.seconds_high)
        likely, age = describe_duration(forecast.seconds), describe_age(time.time() - rates.measured_at)
        self.display.note(f"expected to take {likely} ({low} to {high}), by {forecast.basis}, {age}", "forecast")
        return forecast

    def _keep_rates(self, costs: CostSample, connect_s: float) -> None:
        """Keep the rates of this start for later forecasts; those of another engine than ours are not the pair's."""
        config = self.prepared.config
        num_places = config.job.workers * config.decoding.max_batch_size
        if self.factory is not load_engine or costs.num_offered < 2 * num_places:
            return  # of another engine, or of batches that were not full
        rates = costs.rates(connect_s=connect_s, origin=f"run {self.run_id}", measured_at=time.time())
        if rates is not None:
            keep_rates(self._pair_key(), rates)

    def _pair_key(self) -> dict[str, Any]:
        return pair_key(self.prepared.config, self.prepared.manifest["identity"]["hashes"])

    def _say_what_fits(self) -> None:
        job = self.prepared.config.job
        if warning := say_room(job) if is_local() else say_no_node(job):
            self.display.note(f"warning: {warning}")

    def _read_through(self, keys: set[DocumentKey]) -> tuple[Source, Plan]:
        """Return the source from which to read, and the plan. Raises InputError for a file that breaks off."""
        output = self.prepared.output
        with writing(output):
            source = regroup(self.prepared.source, output, self._checkpoint)
        with using(output):
            return source, self._plan(source, keys)

    def _plan(self, source: Source, keys: set[DocumentKey]) -> Plan:
        decoding = self.prepared.config.decoding
        begin = time.monotonic()
        plan = make_plan(source, self.prepared.prompts, keys, decoding.max_new_tokens, decoding.seed, self._checkpoint)
        self.display.note(
            f"{len(keys)} of {source.num_rows} rows to do, about {plan.num_prompt_tokens():,} prompt tokens "
            f"(planned in {time.monotonic() - begin:.1f} s)"
        )
        return plan

    def _driver(self, source: Source, plan: Plan, ledger: Ledger, tried: Mapping[DocumentKey, Tried]) -> Driver:
        config, job = self.prepared.config, self.prepared.config.job
        limits = Limits(
            max_attempts=job.max_attempts,
            deadline_base_s=job.deadline_base_s,
            deadline_s_per_token=job.deadline_s_per_token,
            stall_s=job.stall_s,
        )
        num_leases = config.decoding.max_batch_size + EXTRA_LEASES
        output, manifest = self.prepared.output, self.prepared.manifest
        with writing(output):
            origin = provenance(manifest, [self.attempt.start], [self.run_id])
            writer = PartWriter(output, self.run_id, manifest["fingerprint"], origin)
            audits = AuditWriter(output, self.run_id)
        return Driver(
            scheduler=Scheduler(plan.work(), limits, num_leases, f"{self.run_id}-", tried),
            pool=Pool(config, source, CheckedFactory(self.factory, manifest["identity"]["hashes"]), num_leases),
            roster=Roster(job.workers),
            committer=Committer(output, writer, audits, self.lock, job.commit_every_rows, job.commit_every_s),
            ledger=ledger,
            display=self.display,
            metrics=Metrics(self.run_id),
            interrupt=self.interrupt,
            attempt=self.attempt,
            source=source,
            job=job,
            is_auditing=config.decoding.audit_fraction > 0,
        )


def _say(counts: Counts) -> str:
    return f"{counts.rows} rows: {counts.done} done, {counts.errors} failed"
