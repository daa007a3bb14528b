"""Calibration: which documents are drawn, and what a worker's time for them becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specextend.cluster.calibration import calibrate, draw_sample
from specextend.cluster.environment import worker_device
from specextend.cluster.estimates import Estimates, TokenEstimate
from specextend.cluster.exits import Interrupt, InterruptedRunError, RefusedError, WorkersFailError
from specextend.cluster.planning import Plan
from specextend.cluster.prepare import Prepared, prepare
from specextend.cluster.rates import Rates
from specextend.core import DocumentKey
from tests.cluster.conftest import Job
from tests.cluster.fakes import FakeEngine, NeverLoads


def corpus(*lengths: int) -> Estimates:
    return Estimates.of({DocumentKey(0, row): TokenEstimate(length, 10) for row, length in enumerate(lengths)})


def drawn(estimates: Estimates, size: int, seed: int = 0) -> list[int]:
    return [estimates[key].num_prompt_tokens for key in draw_sample(estimates, size, seed)]


def test_long_documents_are_represented_by_their_tokens():
    """Ten books among a thousand notes take half of the night; a plain draw would show none of them."""
    estimates = corpus(*[90] * 1000, *[9990] * 10)
    for seed in range(20):
        assert Counter(drawn(estimates, 4, seed)) == {9990: 2, 90: 2}


def test_one_giant_does_not_leave_the_sample_short():
    """Nearly every token that is drawn is one of its own."""
    assert sorted(drawn(corpus(1_000_000, *[100] * 20), 5)) == [100, 100, 100, 100, 1_000_000]


def test_a_sample_is_seeded_and_longest_first():
    """Two calibrations of one plan decode the same documents, in the order in which a run would."""
    estimates = corpus(*range(100, 1100))
    sample = draw_sample(estimates, 8, 7)
    assert sample == draw_sample(estimates, 8, 7) != draw_sample(estimates, 8, 8)
    assert len(set(sample)) == 8
    lengths = [estimates[key].num_prompt_tokens for key in sample]
    assert lengths == sorted(lengths, reverse=True)


def test_a_small_corpus_is_drawn_whole_without_what_is_refused():
    """A null text costs nothing and shows nothing."""
    assert drawn(corpus(5, 0, 7), 9) == [7, 5]


def calibrated(run: Job, num_documents: int, factory: Any = FakeEngine, interrupt: Interrupt | None = None) -> Rates:
    prepared = prepare(run.config())
    return calibrate(
        prepared, plan_of(prepared), num_documents, interrupt or Interrupt(600.0), lambda line: None, factory
    )


def plan_of(prepared: Prepared) -> Plan:
    """Estimates without a look at the text, in which row numbers are lengths."""
    keys = [DocumentKey(0, row) for row in range(prepared.source.num_rows)]
    return Plan(Estimates.of({key: TokenEstimate(key.row + 1, 5) for key in keys}), None, Counter(), 0)


@pytest.mark.slow
def test_a_worker_decodes_the_sample_and_the_output_folder_stays_empty(job: Callable[..., Job]):
    """A document that fails is left out, and those that only keep the batch full do not count."""
    run = job([*(f"text {row}" for row in range(6)), None])
    rates = calibrated(run, 7)
    assert rates.num_documents == 6
    assert rates.output_share == 1.0
    assert rates.mean_s > 0
    assert rates.start_s > 0
    assert rates.device == worker_device(run.config().job) != "cpu"
    assert rates.origin == "a calibration"
    assert not run.output.exists()


def test_too_few_documents_are_refused(job: Callable[..., Job]):
    """Before anything is loaded."""
    with pytest.raises(RefusedError, match="needs 2 documents that can be decoded, but got 1"):
        calibrated(job(["one"]), 4, NeverLoads())


@pytest.mark.slow
def test_a_worker_that_cannot_be_built_is_said_in_one_line(job: Callable[..., Job]):
    """A model that does not fit the GPU is found out here, not in the night."""
    with pytest.raises(WorkersFailError, match=r"the worker of the calibration failed: .*the weights are gone"):
        calibrated(job(["one", "two"]), 2, NeverLoads())


@pytest.mark.slow
def test_documents_that_all_fail_are_said(job: Callable[..., Job]):
    """With the reason of each: there is nothing to forecast by."""
    with pytest.raises(RefusedError, match="ValueError: this document cannot be done"):
        calibrated(job(["raise", "raise", "raise"]), 3)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_calibration(job: Callable[..., Job], tmp_path: Path):
    """It took the memory of the machine, say."""
    with pytest.raises(WorkersFailError, match="its process ended"):
        calibrated(job(["one", "two", "kill"]), 3)


def test_a_calibration_can_be_interrupted(job: Callable[..., Job]):
    """Ctrl-C, when somebody sees how long it takes."""
    interrupt = Interrupt(600.0)
    interrupt.tell("SIGINT received")
    interrupt.disarm()
    with pytest.raises(InterruptedRunError):
        calibrated(job(["one", "two"]), 2, NeverLoads(), interrupt)
