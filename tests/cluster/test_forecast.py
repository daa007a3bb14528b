"""Forecasts: which documents are drawn, what a worker's time for them becomes, and what is claimed of the rest."""

import random
from dataclasses import replace

import pytest

from specextend.cluster.backlog import TokenEstimate
from specextend.cluster.checks import check_run
from specextend.cluster.dry_run import (
    DocumentCost,
    Outlook,
    Rates,
    calibrate,
    draw_sample,
    fit_rates,
)
from specextend.cluster.exits import Interrupt, RunError
from specextend.core import DocumentKey
from tests.cluster.fakes import NeverLoads
from tests.cluster.lengths import estimates_of

RATES = Rates(
    prefill=1e-3, decode=1e-2, output_share=0.5, spread=0.0, num_documents=100, start_s=30.0, device="a device"
)
"""A document of 1,000 prompt tokens that may write 200 takes a second to read and a second to write."""
DOCUMENT = TokenEstimate(1000, 200)


def documents(*found):
    return estimates_of({DocumentKey(0, row): document for row, document in enumerate(found)})


def outlook(*found, batch=1, **changed):
    return Outlook(documents(*found), replace(RATES, **changed), batch)


def test_twice_the_workers_take_half_the_time_but_never_less_than_the_longest_document():
    """The one document of a thousand pages is why a night with a hundred workers is no shorter than with fifty."""
    corpus = outlook(*[DOCUMENT] * 4000, TokenEstimate(100_000, 200))
    one, two = (corpus.lasts(workers).seconds - RATES.start_s for workers in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.02)
    assert all(corpus.lasts(workers).seconds - RATES.start_s >= 101 for workers in (8, 200, 10_000))
    assert corpus.lasts(10_000).workers == 4001, "a worker without a document is not started"


def draw_cost(draw, num_tokens):
    """A document of a made-up pair: outputs end anywhere, and a machine is never quite steady."""
    outputs = draw.randint(40, 250)
    prefill_s = num_tokens * (1e-3 + 1e-7 * num_tokens) * draw.uniform(0.95, 1.05)
    decode_s = outputs * (2e-2 + 1e-6 * num_tokens) * draw.uniform(0.8, 1.2)
    return DocumentCost(num_tokens, outputs, 256, prefill_s, decode_s)


@pytest.mark.parametrize("num_measured, least", [(2, 0.88), (4, 0.92), (16, 0.95)])
def test_the_interval_holds_the_truth_of_nearly_all_draws(num_measured, least):
    """It promises 95 of 100, whichever documents are drawn; of so few as two or four, about 90."""
    held = 0
    for seed in range(200):
        draw = random.Random(seed)
        costs = [draw_cost(draw, int(draw.lognormvariate(7.5, 0.8))) for _ in range(300)]
        estimates = documents(*(TokenEstimate(cost.num_prompt_tokens, 256) for cost in costs))
        sample = [costs[key.row] for key in draw_sample(estimates, num_measured, seed)]
        forecast = Outlook(estimates, fit_rates(sample, start_s=0.0, device=""), 1).lasts(1)
        truth = sum(cost.prefill_s + cost.decode_s for cost in costs)
        held += forecast.seconds_low <= truth <= forecast.seconds_high
    assert held >= 200 * least


@pytest.mark.slow
def test_a_worker_that_fails_is_said_in_one_line(job):
    """A model that does not fit the GPU is found out here, not in the night."""
    prepared = check_run(job(["one", "two"]).config())
    with pytest.raises(RunError, match=r"the worker of the calibration failed: .*the weights are gone"):
        calibrate(prepared, documents(DOCUMENT, DOCUMENT), 3, Interrupt(600.0), lambda line: None, NeverLoads())
