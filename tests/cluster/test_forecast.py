"""Forecasts by made-up rates: what they claim of workers, bounds and prices."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from specextend.cluster.calibration import draw_sample
from specextend.cluster.estimates import Estimates, TokenEstimate
from specextend.cluster.forecast import DRIFT, MOST_UNCERTAIN, START_FACTOR, Outlook, cost_of, makespan
from specextend.cluster.rates import DocumentCost, Rates, fit_rates
from specextend.core import DocumentKey

RATES = Rates(
    prefill=(1e-3, 0.0),
    decode=(1e-2, 0.0),
    output_share=0.5,
    mean_s=1.0,
    spread_s=0.0,
    num_documents=100,
    start_s=30.0,
    device="a device",
    origin="a calibration",
    measured_at=0.0,
)
"""A document of 1,000 prompt tokens that may write 200 takes a second to read and a second to write."""
DOCUMENT = TokenEstimate(1000, 200)


def outlook(*documents: TokenEstimate, batch: int = 1, **changed: object) -> Outlook:
    estimates = {DocumentKey(0, row): document for row, document in enumerate(documents)}
    return Outlook(Estimates.of(estimates), replace(RATES, **changed), batch)


def test_seconds_are_those_of_the_tokens_and_of_the_start():
    """By hand: 500 documents of two seconds, and half a minute until the first one begins."""
    forecast = outlook(*[DOCUMENT] * 500).lasts(1)
    assert forecast.seconds == pytest.approx(30 + 1000)
    assert (forecast.documents, forecast.workers) == (500, 1)
    assert forecast.basis == "a calibration of 100 documents on a device"


def test_long_documents_cost_more_for_each_token():
    """Attention grows with the length: eight documents of 1K are not one of 8K."""
    growing = {"prefill": (1e-3, 1e-6), "decode": (1e-2, 1e-6)}
    short, long = (outlook(*each, **growing).busy_s for each in ([DOCUMENT] * 8, [TokenEstimate(8000, 1600)]))
    assert short == pytest.approx(8 * (1000 * (1e-3 + 1e-3) + 100 * (1e-2 + 1e-6 * 1050)))
    assert long > 1.5 * short


def test_a_document_in_parts_is_forecast_as_its_requests():
    """Seven parts and a merge are read as eight short prompts, and decoded beside each other, but for the merge."""
    growing, none = {"prefill": (1e-3, 1e-6), "decode": (1e-2, 1e-6)}, np.zeros(1, np.int64)
    columns = [np.array([value]) for value in (8 * DOCUMENT.num_prompt_tokens, 8 * DOCUMENT.max_new_tokens, 8)]
    book = Outlook(Estimates(none, none, *columns), replace(RATES, **growing), 4)
    pages = outlook(*[DOCUMENT] * 8, batch=4, **growing)
    assert book.busy_s == pytest.approx(pages.busy_s)
    book_s, pages_s = (each.lasts(1).seconds_high - START_FACTOR * RATES.start_s for each in (book, pages))
    one = outlook(DOCUMENT, batch=4, **growing).lasts(1).seconds_high - START_FACTOR * RATES.start_s
    assert pages_s < book_s < pages_s + one
    assert book.lasts(8).workers == 1, "no worker shares a document"


def test_twice_the_workers_take_half_the_time_but_never_less_than_the_longest_document():
    """The one document of a thousand pages is why a night with a hundred workers is no shorter than with fifty."""
    book = TokenEstimate(100_000, 200)
    corpus = outlook(*[DOCUMENT] * 400, book)
    begin, longest_s = RATES.start_s, 100.0 + 1.0
    one, two = (corpus.lasts(workers).seconds - begin for workers in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.01)
    assert all(corpus.lasts(workers).seconds - begin >= longest_s - 1e-6 for workers in (8, 16, 200, 10_000))
    assert corpus.lasts(10_000).seconds - begin == pytest.approx(longest_s)
    assert corpus.lasts(10_000).workers == 401, "a worker without a document is not started"


def test_a_document_that_runs_alone_gains_nothing_from_a_batch():
    """Rates are those of full batches. How much faster the last documents are when it empties is not known."""
    alone = outlook(DOCUMENT, batch=4).lasts(1)
    assert alone.seconds_low == pytest.approx(2 / (1 + DRIFT) + 30 / START_FACTOR, rel=0.01)
    assert alone.seconds_high > (1 + 4 * 1) + 30
    assert 30 + 2 < alone.seconds < 30 + 5
    many = outlook(*[DOCUMENT] * 4000, batch=4).lasts(1)
    assert many.seconds == pytest.approx(30 + 8000, rel=0.01), "in a long run the end does not count"


def test_documents_that_are_refused_take_no_time():
    """They are among the documents that a start has to do."""
    forecast = outlook(DOCUMENT, TokenEstimate(0, 0)).lasts(1)
    assert forecast.seconds == pytest.approx(32)
    assert forecast.documents == 2
    nothing = outlook(TokenEstimate(0, 0))
    assert nothing.lasts(1).seconds == 0
    assert nothing.documents_per_hour(1) is None


def test_documents_an_hour_leave_the_start_out():
    """They compare machines; half a minute of loading is nothing of a night."""
    assert outlook(*[DOCUMENT] * 10).documents_per_hour(2)["likely"] == pytest.approx(3600)


def test_the_fewest_workers_that_are_done_in_time_are_found():
    """One less would be late."""
    corpus = outlook(*[DOCUMENT] * 1800, spread_s=0.5)
    for surely in (False, True):
        workers = corpus.workers_within(630, surely=surely)
        seconds = [corpus.lasts(number) for number in (workers - 1, workers)]
        late, in_time = ((each.seconds_high if surely else each.seconds) for each in seconds)
        assert late > 630 >= in_time
    assert corpus.workers_within(630, surely=False) == 6
    assert corpus.workers_within(630, surely=True) == 8


def test_no_number_of_workers_makes_up_for_a_document_that_is_too_long():
    """Nor for a start that has passed the hour already."""
    corpus = outlook(DOCUMENT, TokenEstimate(100_000, 200))
    assert corpus.workers_within(100, surely=False) is None
    assert corpus.workers_within(-5, surely=False) is None


def test_a_price_is_that_of_worker_hours_with_their_loading():
    """A machine is paid while it loads."""
    forecast = outlook(*[DOCUMENT] * 1800).lasts(4)
    cost = cost_of(forecast, 3.0)
    assert cost["worker_hours"] == pytest.approx(4 * (30 + 900) / 3600)
    assert cost["cost"] == pytest.approx(3.0 * cost["worker_hours"])
    assert cost["cost_low"] == pytest.approx(3.0 * 4 * forecast.seconds_low / 3600)
    assert cost["cost_high"] == pytest.approx(3.0 * 4 * forecast.seconds_high / 3600)


@pytest.mark.parametrize(("jobs", "places", "end"), [([3, 2, 2], 2, 4), ([5, 1, 1], 2, 5), ([1], 9, 1), ([], 3, 0)])
def test_the_last_job_ends_when_the_places_are_filled_one_by_one(jobs: list[float], places: int, end: float):
    assert makespan(jobs, places) == end


def test_a_million_documents_are_forecast_in_no_time():
    """The shortest of them fill the gaps: the end is that of an even share."""
    seconds = [1 + 1e-6 * row for row in range(100_000, 0, -1)]
    assert makespan(seconds, 64) == pytest.approx(sum(seconds) / 64, rel=1e-3)


def draw_cost(draw: random.Random, num_tokens: int) -> DocumentCost:
    """A document of a made-up pair: outputs end anywhere, and a machine is never quite steady."""
    outputs = draw.randint(40, 250)
    prefill_s = num_tokens * (1e-3 + 1e-7 * num_tokens) * draw.uniform(0.95, 1.05)
    decode_s = outputs * (2e-2 + 1e-6 * num_tokens) * draw.uniform(0.8, 1.2)
    return DocumentCost(num_tokens, outputs, 256, prefill_s, decode_s)


@pytest.mark.parametrize(("num_measured", "least"), [(2, 0.88), (4, 0.92), (16, 0.95)])
def test_the_interval_holds_the_truth_of_nearly_all_draws(num_measured: int, least: float):
    """It promises 95 of 100, whichever documents are drawn; of so few as two or four, about 90."""
    held = 0
    for seed in range(200):
        draw = random.Random(seed)
        costs = [draw_cost(draw, int(draw.lognormvariate(7.5, 0.8))) for _ in range(300)]
        documents = {DocumentKey(0, row): TokenEstimate(cost.num_prompt_tokens, 256) for row, cost in enumerate(costs)}
        estimates = Estimates.of(documents)
        sample = [costs[key.row] for key in draw_sample(estimates, num_measured, seed)]
        rates = fit_rates(sample, start_s=0.0, device="", origin="", measured_at=0.0)
        forecast = Outlook(estimates, rates, 1).lasts(1)
        truth = sum(cost.prefill_s + cost.decode_s for cost in costs)
        held += forecast.seconds_low <= truth <= forecast.seconds_high
    assert held >= 200 * least


def test_more_measured_documents_make_a_narrower_interval():
    """Which is what somebody pays for with a larger `--calibrate`."""
    corpus = [DOCUMENT] * 1000
    widths = []
    for number in (2, 4, 16, 1000):
        forecast = outlook(*corpus, spread_s=0.5, num_documents=number).lasts(1)
        widths.append(forecast.seconds_high / forecast.seconds_low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx((1 + DRIFT) ** 2, rel=0.05), "below that, machines are not steady"


def test_a_short_rest_of_a_run_of_long_documents_has_an_interval_of_its_own_size():
    """The spread of long documents in seconds would put the end of one short row thousands of years away."""
    short = TokenEstimate(50, 20)
    forecast = outlook(short, spread_s=8.0, num_documents=16).lasts(1)
    assert 1 < forecast.seconds_high / forecast.seconds <= MOST_UNCERTAIN
    hopeless = outlook(short, spread_s=1e6, num_documents=2).lasts(1)
    assert hopeless.seconds_high <= MOST_UNCERTAIN * hopeless.seconds + 1e3
