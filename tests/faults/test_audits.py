"""Faults while documents are decoded again: the summaries are there, and the run ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from specextend.cluster.exits import EXIT_DONE, Interrupt
from specextend.cluster.run import run
from specextend.config import RunConfig
from specextend.data.audit_rows import read_audits
from specextend.data.storage import resolve
from specextend.decoding.engine import Engine
from specextend.loading import load_engine
from tests.contract.conftest import NUM_ROWS
from tests.faults.conftest import RealJob
from tests.faults.engines import MortalEngine, is_audit, note_received
from tests.job.conftest import CONFIG

pytestmark = pytest.mark.slow
SETTINGS = ["decoding.audit_fraction=1", "decoding.max_batch_size=3"]


class DiesAuditing(MortalEngine):
    """Its process is killed in the third step of a batch of audits, once the driver has all that was decoded before."""

    moment = "auditing"

    def is_moment(self, outputs: dict[str, int]) -> bool:
        return any(map(is_audit, outputs)) and max(outputs.values()) > 2


class FailsAuditing(Engine):
    """Every plain step of an audit fails."""

    def _step(self, running):
        if any(each.request.audit_of is not None for each in running):
            raise RuntimeError("attention failed")
        super()._step(running)


@dataclass(frozen=True)
class Becomes:
    """Makes engines of another class."""

    kind: type[Engine]
    marker: Path

    def __call__(self, config: RunConfig) -> Engine:
        engine = load_engine(config)
        engine.__dict__.pop("num_steps", None)
        engine.__class__ = self.kind
        engine.marker = self.marker
        engine.num_steps = 0
        return engine


def run_with(real_job: RealJob, kind: type[Engine]) -> int:
    config = RunConfig.load(CONFIG, [*real_job.settings(), *SETTINGS])
    return run(config, real_job.screen, Interrupt(600.0), factory=Becomes(kind, real_job.folder / "died"))


def test_a_worker_that_is_killed_in_an_audit_costs_no_summary(real_job: RealJob, undisturbed):
    """Its documents were done; those that waited behind the audit had not begun, and are charged nothing."""
    note_received(real_job.screen, real_job.folder / "died")
    assert run_with(real_job, DiesAuditing) == EXIT_DONE
    assert (real_job.folder / "died").exists()
    assert real_job.result() == undisturbed
    assert set(real_job.column("attempts")) == {1}
    audited = read_audits(resolve(str(real_job.output)))
    assert 0 < len(audited) < NUM_ROWS, "what the dead worker had in hand is lost, and the next one goes on"


def test_audits_that_fail_are_rows_with_their_error(real_job: RealJob, undisturbed):
    """A fault that only plain decoding has is found by the audit, and does no harm to the run."""
    assert run_with(real_job, FailsAuditing) == EXIT_DONE
    assert real_job.result() == undisturbed
    audited = read_audits(resolve(str(real_job.output))).to_pylist()
    assert len(audited) == NUM_ROWS
    assert {row["error"] for row in audited} == {"RuntimeError: attention failed"}
