"""The main loop of a run: it hands out leases, collects outcomes and commits finished rows.

Start with `Driver.drive`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from specextend.cluster.exits import Interrupt, InterruptedRunError, OutputError, RunError
from specextend.cluster.messages import (
    Begun,
    Died,
    Draining,
    Event,
    Lease,
    Lost,
    Outcome,
    Place,
    Polled,
    Ready,
    Returned,
    StartFailed,
    SuspectedError,
    WorkerInfo,
)
from specextend.cluster.progress import (
    AwakeClock,
    Display,
    ErrorGuard,
    Fact,
    Ledger,
    Pace,
    lease_facts,
    result_facts,
)
from specextend.cluster.records import Committer, StartRecord, say_failed, task_error
from specextend.cluster.scheduler import PAUSE_S, Scheduler
from specextend.cluster.workers import Pool, Roster
from specextend.config import JobOptions
from specextend.core import DocumentKey, Values, counted
from specextend.data.inputs import DocumentError, InputUnreachableError
from specextend.data.parquet import DAMAGED
from specextend.data.run_folder import RELEASED
from specextend.data.source import Source
from specextend.data.storage import is_away
from specextend.decoding.decoding_options import DECIDED_DOCUMENTS, LEAST_SPEEDUP
from specextend.requests.tasks import failed_row
from specextend.stats import DecodingStats

LOOK_EVERY_S = 1.0
"""Seconds between two checks of workers and progress."""
TICK_S = 0.2
"""Seconds to wait for an event before checking clocks and signals again."""
MOST_NAMES = 10


@dataclass(slots=True)
class Driver:
    """Runs documents until each is done or has an error row."""

    scheduler: Scheduler
    pool: Pool
    roster: Roster
    committer: Committer
    ledger: Ledger
    display: Display
    interrupt: Interrupt
    record: StartRecord
    source: Source
    job: JobOptions
    count: Callable[[DecodingStats | None], object] = lambda stats: None
    """Receives the counts of a document, None for a failed one."""
    clock: Callable[[], float] = field(default_factory=AwakeClock)
    _moved_at: float = field(init=False)
    """Time of the last token or outcome."""
    _errors: ErrorGuard = field(init=False)
    _kernels_said: set[str] = field(default_factory=set)
    _pace: Pace = field(default_factory=lambda: Pace(LOOK_EVERY_S))
    _is_stopping: bool = False
    _is_doubted: bool = False

    def __post_init__(self) -> None:
        self._moved_at = self.clock()
        self._errors = ErrorGuard(self.job.max_error_fraction, self.scheduler.num_open)

    def drive(self) -> None:
        """Run until every document is done or given up. Finished rows are committed in any case.

        Raises:
            InterruptedRunError: The run was told to stop.
            InputChangedError: An input file has changed since the run began.
            RunError: No worker can be started, no worker has read or written a token for
                `JobOptions.silence_s`, most documents fail, or the folder's lock was lost.
            OutputError: The output folder cannot be written.
        """
        try:
            self._staff(self.clock())  # do not wait before there are workers
            while not self.scheduler.is_done:
                self._turn()
        except InterruptedRunError:
            self._is_stopping = True
            try:
                self._collect(0.0)
            finally:
                self.committer.commit()
            raise
        except OutputError:
            raise
        except Exception:
            self.committer.commit()
            raise
        self.committer.commit()

    def _turn(self) -> None:
        self.interrupt.check()
        now = self.clock()
        for worker, lease in self.scheduler.assign(now):
            self.display.event("document_leased", **lease_facts(worker, lease))
            self.pool.run(worker, lease)
        self._collect(TICK_S)
        is_due = self._pace.is_due(self.clock())
        if is_due:  # after the events, so that a worker is judged by its latest report
            self._enforce(self.clock())
            self._staff(self.clock())
        self._check_silence()
        self.committer.commit_if_due(self.clock())
        if not self.scheduler.is_done:
            self._errors.check()
        if is_due or self.scheduler.is_done:
            now = self.clock()
            workers = self.roster.num_ready, self.roster.num_loading
            running = self.scheduler.running()
            self.display.show(self.ledger.snapshot(now, *workers, running), now)

    def _staff(self, now: float) -> None:
        wanted = self.scheduler.num_wanted
        for worker in self.roster.due(now, wanted):
            self.pool.start(worker)
            self.record.worker_asked(worker, self.roster.seat(worker))
        for worker in self.roster.not_needed(wanted):
            self._let_go(worker)
        for worker in self.scheduler.spare(now):
            self.scheduler.release(worker)
            self._let_go(worker)
        self.scheduler.expect(self.roster.num_coming(now))

    def _let_go(self, worker: str) -> None:
        self.display.event("worker_released", worker=worker)
        self.pool.kill(worker)
        self.record.note(worker, "gone", reason=RELEASED)
        self.roster.let_go(worker)

    def _collect(self, timeout_s: float) -> None:
        for event in self.pool.wait(timeout_s):
            self._handle(event, self.clock())
            self._fail_given_up()
        self._remember_charges()

    def _remember_charges(self) -> None:
        if (charges := self.scheduler.charges()) is not None:
            self.committer.remember(charges)

    def _check_silence(self) -> None:
        """Raise RunError after `silence_s` without a token: no worker reports such faults."""
        if self.clock() - self._moved_at <= self.job.silence_s:
            return
        num_ready = self.roster.num_ready
        workers = counted(num_ready, "worker") if num_ready else "no worker is"
        parts = [f"no token for {self.job.silence_s:.0f} s: {workers} ready"]
        leased = [held.lease.key for held in self.scheduler.held.values()]
        waiting = self.scheduler.first_waiting(MOST_NAMES)
        for begin, keys, num in (
            ("at work on", leased, len(leased)),
            ("waiting:", waiting, self.scheduler.num_waiting),
        ):
            names = ", ".join(map(self.source.place, keys[:MOST_NAMES]))
            more = f" and {num - MOST_NAMES} more" if num > MOST_NAMES else ""
            parts += [f"{begin} {names}{more}"] * bool(num)
        raise RunError("; ".join([*parts, "finished work is kept, run again"]))

    def _enforce(self, now: float) -> None:
        for held in self.scheduler.overdue(now):
            lease = held.lease
            seconds = self.scheduler.seconds_for(lease)
            message = f"not done {seconds:.0f} s after the start of its prefill"
            doc_id = self.source.doc_id(lease.key)
            facts = lease_facts(held.worker.name, lease) | {"document": doc_id}
            self.display.note(
                f"document {doc_id} is cancelled: {message}", "document_cancelled", **facts
            )
            self.scheduler.expire(lease.lease_id, message)
            self._fail_given_up()
            self.pool.cancel(lease.lease_id)
        for worker in self.scheduler.stalled(now):
            reason = f"no step for {self.job.stall_s:.0f} s"
            self.display.note(
                f"{worker} is killed: {reason}", "worker_killed", worker=worker, reason=reason
            )
            self.pool.kill(worker)
            self._gone(worker, reason)
            self.scheduler.leave(worker, "Stalled", f"the worker made {reason}")
            self._fail_given_up()
        self._remember_charges()

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case Begun(worker):
                self.roster.begun(worker)
                self.record.note(worker, "begun")
            case Ready(worker, info):
                self._ready(worker, info, now)
            case StartFailed(worker, reason):
                self.record.note(worker, "gone", reason=reason)
                pause = self.roster.failed(worker, reason, now)
                message = f"{worker} could not be built, next try in {pause:.0f} s: {reason}"
                self.display.note(message, "worker_failed_to_start", worker=worker, reason=reason)
            case Returned(worker, lease, outcome):
                self._returned(worker, lease, outcome, now)
            case Polled(worker, report):
                if self.scheduler.report(worker, report.num_steps, report.outputs, now):
                    self._moved_at = now
            case Draining(worker):
                self._drain(worker)
            case Died(worker, reason, with_node):
                self._died(worker, reason, with_node=with_node)

    def _ready(self, worker: str, info: WorkerInfo, now: float) -> None:
        self.roster.ready(worker)
        self.record.note(worker, "ready", **info._asdict())
        device = ", ".join(info.accelerators) or f"seat {self.roster.seat(worker)}"
        place = Place(info.host, device)
        facts: dict[str, Fact] = {"worker": worker, "host": info.host, "place": device}
        self.display.event("worker_ready", **facts, pid=info.pid, device=info.device)
        self._say_kernels(worker, info)
        if (deaths := self.scheduler.join(worker, place, now)) is None:
            return
        num_deaths, last_words = deaths
        self.roster.leave_out(worker)
        why = (
            f"{counted(num_deaths, 'worker')} died there in a row without a finished document: "
            f"{last_words}"
        )
        where = f"{info.host} ({device}, {info.device})"
        message = f"{where} is left out, {worker} there gets no more documents: {why}"
        self.display.note(message, "place_left_out", **facts, reason=why)

    def _say_kernels(self, worker: str, info: WorkerInfo) -> None:
        for kernel in info.kernels:
            message = f"{kernel['name']}: {'taken' if kernel['taken'] else 'left out'}"
            if message in self._kernels_said:
                continue
            self._kernels_said.add(message)
            why = kernel["why"]
            facts = {"worker": worker, "kernel": kernel["name"], "taken": kernel["taken"]}
            said = f"{message}, {why}" if info.accelerators else ""
            self.display.event("kernel", said, **facts, reason=why)

    def _returned(self, worker: str, lease: Lease, outcome: Outcome, now: float) -> None:
        if lease.lease_id not in self.scheduler.held:
            self.scheduler.closed(worker)
            return
        if isinstance(outcome, Lost):
            self.scheduler.take_back(lease.lease_id, outcome.reason)
            return
        if isinstance(outcome, DocumentError) and outcome.stage == "read" and outcome.retryable:
            self._unread(worker, lease, outcome, now)
            return
        self.roster.document_done()
        if isinstance(outcome, SuspectedError):
            message = f"{worker}: a batch failed: {outcome}"
            facts = lease_facts(worker, lease) | {"error_class": outcome.error_class}
            self.display.note(message, "batch_failed", **facts)
            self.scheduler.blame(lease.lease_id, outcome)
            return
        self._moved_at = now
        if isinstance(outcome, DocumentError):
            self.scheduler.reject(lease.lease_id, outcome)
            return
        self.scheduler.finish(lease.lease_id)
        failure = task_error(outcome.row)
        self._close(lease.key, outcome.row, failure, lease.attempt, worker, outcome.stats)
        self.display.event("document_done", **lease_facts(worker, lease), **result_facts(outcome))
        self._note_memory(worker, outcome.used_gib)
        self._note_speedup(worker, outcome.speedup)
        if not self._is_doubted and (doubt := self.ledger.doubt):
            self._is_doubted = True
            self.display.note(f"warning: {doubt}", "draft_doubted")

    def _close(
        self,
        key: DocumentKey,
        row: Values,
        failure: DocumentError | None,
        attempt: int,
        worker: str,
        stats: DecodingStats | None = None,
    ) -> None:
        if failure is not None:
            say_failed(self.display, key, failure, attempt, worker)
        self._errors.count(failure)
        self.committer.add(row)
        self.ledger.finish(key, stats, has_failed=failure is not None)
        self.count(stats)

    def _note_memory(self, worker: str, used_gib: float) -> None:
        if self.record.worker_used(worker, used_gib):
            planned_gib = self.record.planned_gib
            said = f"memory: planned {planned_gib:.1f} GiB, used {used_gib:.1f} GiB at most"
            self.display.note(
                said, "memory", worker=worker, planned_gib=planned_gib, used_gib=used_gib
            )

    def _note_speedup(self, worker: str, speedup: float | None) -> None:
        is_new = self.record.worker_tried(worker, speedup)
        if is_new and speedup is not None and speedup < LEAST_SPEEDUP:
            pause = counted(DECIDED_DOCUMENTS, "document")
            said = (
                f"{worker} drafts no more for {pause}: drafts made it {speedup:.2f} times as fast "
                "as plain decoding"
            )
            self.display.note(said, "drafts_lose", worker=worker, speedup=speedup)

    def _unread(self, worker: str, lease: Lease, error: DocumentError, now: float) -> None:
        """Retry an unreadable document on another worker, unless the file itself is damaged."""
        self.display.event("document_unread", **lease_facts(worker, lease), reason=error.message)
        holder = self.scheduler.workers[worker]
        was_told = self._is_stopping or holder.rests_until > now
        if not was_told and is_damaged_row(self.source, lease.key):
            self.scheduler.blame(lease.lease_id, error)
            self._moved_at = now
            return
        self.scheduler.unread(lease.lease_id, now)
        if not was_told:
            host = holder.place.host
            message = (
                f"{worker} on {host} cannot read a document, and rests for {PAUSE_S:g} "
                f"s: {error.message}"
            )
            self.display.note(
                message, "worker_cannot_read", worker=worker, host=host, reason=error.message
            )

    def _drain(self, worker: str) -> None:
        host = self.scheduler.workers[worker].place.host
        message = f"{worker} gets no more documents: its node ({host}) is about to go"
        self.display.note(message, "worker_drains", worker=worker, host=host)
        for lease in self.scheduler.drain(worker):
            self.display.event("lease_taken_back", **lease_facts(worker, lease))
            self.pool.cancel(lease.lease_id)

    def _died(self, worker: str, reason: str, *, with_node: bool) -> None:
        self.display.note(f"{worker} died: {reason}", "worker_died", worker=worker, reason=reason)
        self._gone(worker, reason)
        if with_node or self.scheduler.workers[worker].is_draining:
            self.scheduler.lose(worker, f"the node was lost: {reason}")
        else:
            self.scheduler.leave(worker, "WorkerDied", f"the worker died: {reason}")

    def _gone(self, worker: str, reason: str) -> None:
        self.record.note(worker, "gone", reason=reason)
        is_explained = self.scheduler.workers[worker].holds_struck
        self.roster.died(worker, reason, is_explained=is_explained)

    def _fail_given_up(self) -> None:
        while self.scheduler.given_up:
            key, attempts, error, worker = self.scheduler.given_up.pop(0)
            if not error.doc_id:
                name = self.source.place if self._is_stopping else self.source.doc_id
                error.doc_id = name(key)
            row = failed_row(key, error, attempts, self.pool.earlier(key))
            self._close(key, row, error, attempts, worker)


def is_damaged_row(source: Source, key: DocumentKey) -> bool:
    """Read a document again after a worker failed to; return True if the file is damaged.

    Raises:
        InputChangedError: The file has changed since the run began.
    """
    anew = copy.copy(source)  # the cache may hold rows from before the damage
    try:
        anew.check_unchanged(key.file)
        anew.read(key)
    except DAMAGED as error:
        return not is_away(error)
    # a worker that can read the document reports it itself
    except (DocumentError, InputUnreachableError):
        return False
    return False
