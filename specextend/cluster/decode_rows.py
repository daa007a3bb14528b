"""The rows that a start has to do: planned, forecast, and decoded by a driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from specextend.cluster.cluster import claimed, connected, say_no_node, settle_cores
from specextend.cluster.committing import Committer, rows_per_commit
from specextend.cluster.display import Display
from specextend.cluster.driver import Driver
from specextend.cluster.environment import is_local, say_room
from specextend.cluster.estimates import RowSet
from specextend.cluster.exits import Interrupt, reading, writing
from specextend.cluster.leases import Limits, Tried
from specextend.cluster.lock import OutputLock
from specextend.cluster.metrics import Metrics
from specextend.cluster.plan import Plan, make_plan, plan_memory, settle_batch_size
from specextend.cluster.prepare import Prepared
from specextend.cluster.progress import Ledger
from specextend.cluster.records import Attempt, tried_before
from specextend.cluster.scheduler import Scheduler
from specextend.cluster.worker import CheckedFactory, EngineFactory
from specextend.cluster.workers import Pool, Roster
from specextend.core import DocumentKey, counted
from specextend.data.audit_rows import AuditWriter
from specextend.data.fingerprint import provenance
from specextend.data.parts import PartWriter, Progress

EXTRA_LEASES = 2
"""Leases that wait at a worker in addition to those that it decodes."""


@dataclass(slots=True)
class RowDecoding:
    """The decoding of the rows that a start has to do, in the output folder that it holds."""

    prepared: Prepared
    lock: OutputLock
    run_id: str
    attempt: Attempt
    display: Display
    interrupt: Interrupt
    factory: EngineFactory
    checkpoint: Callable[[], None]
    """Called between the steps of long operations; may raise."""

    def plan(self, keys: RowSet) -> Plan:
        """Plan the rows. Raises InputError for a file that breaks off."""
        source, decoding = self.prepared.source, self.prepared.config.decoding
        begin = time.monotonic()
        plan = make_plan(source, self.prepared.prompts, keys, decoding.max_new_tokens, decoding.seed, self.checkpoint)
        self.display.note(
            f"{len(keys):,} of {counted(source.num_rows, 'row')} to do, "
            f"about {counted(plan.num_prompt_tokens(), 'prompt token')} (planned in {time.monotonic() - begin:.1f} s)"
        )
        return plan

    def run(self, plan: Plan, progress: Progress, num_errors: int) -> None:
        """Decode what `plan` has planned. num_errors: error rows of earlier starts that are left as they are."""
        with reading(self.prepared.output):
            tried = tried_before(self.prepared.output, progress)
        config = settle_batch_size(self.prepared.config, self.prepared.facts, plan)
        self.prepared = replace(self.prepared, config=config)
        self._plan_memory(plan)
        self._decode(plan, Ledger(plan.estimates, len(progress.done), num_errors), tried)

    def _decode(self, plan: Plan, ledger: Ledger, tried: Mapping[DocumentKey, Tried]) -> None:
        with connected(self.interrupt), claimed(self.prepared.output.path):
            self.prepared = replace(self.prepared, config=settle_cores(self.prepared.config))
            self._say_what_fits()
            driver = self._driver(plan, ledger, tried)
            try:
                driver.run()
            finally:
                driver.pool.close()
                self.attempt.workers_released()

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

    def _say_what_fits(self) -> None:
        job = self.prepared.config.job
        if warning := say_room(job) if is_local() else say_no_node(job):
            self.display.note(f"warning: {warning}")

    def _driver(self, plan: Plan, ledger: Ledger, tried: Mapping[DocumentKey, Tried]) -> Driver:
        source, config, job = self.prepared.source, self.prepared.config, self.prepared.config.job
        limits = Limits(
            max_attempts=job.max_attempts,
            deadline_s=job.document_deadline_s,
            stall_s=job.stall_s,
        )
        num_leases = config.decoding.batch_size + EXTRA_LEASES
        group_rows = [file.group_rows for file in source.files]
        output, manifest = self.prepared.output, self.prepared.manifest
        with writing(output):
            origin = provenance(manifest, [self.attempt.start], [self.run_id])
            writer = PartWriter(output, self.run_id, manifest["fingerprint"], origin)
            audits = AuditWriter(output, self.run_id)
        return Driver(
            scheduler=Scheduler(plan.estimates, limits, num_leases, f"{self.run_id}-", tried, group_rows),
            pool=Pool(config, source, CheckedFactory(self.factory, manifest["identity"]["hashes"]), num_leases),
            roster=Roster(job.workers),
            committer=Committer(output, writer, audits, self.lock, rows_per_commit(job.workers), job.commit_every_s),
            ledger=ledger,
            display=self.display,
            metrics=Metrics(self.run_id),
            interrupt=self.interrupt,
            attempt=self.attempt,
            source=source,
            job=job,
            is_auditing=config.decoding.audit_fraction > 0,
        )
