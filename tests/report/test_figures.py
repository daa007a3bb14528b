"""Figures of a report that can be computed in the head: of two documents, and of the times of two nights."""

import json
from pathlib import Path

import pytest

from specextend.cluster.records import StartRecord
from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from specextend.report import build_report
from specextend.stats import DecodingStats
from tests.report.made_up import (
    FIRST,
    NIGHT_S,
    PRICE,
    SECOND,
    SetClock,
    config_of,
    done_row,
    rows_of_worker,
    start_worker,
)

PAID_S = 2 * (118 - 2) + 2 * (420 - 5)
DRAFTED = DecodingStats(
    num_prompt_tokens=1000,
    num_cached_tokens=200,
    num_output_tokens=21,
    num_spec_steps=8,
    num_plain_steps=2,
    num_forwards=10,
    num_draft_tokens=64,
    num_network_steps=7,
    num_first_accepted=5,
    num_accepted_tokens=10,
    acceptance_histogram=[2, 2, 4],
    num_retrievals=3,
    retrieval_coverage_sum=1.5,
    retrieval_churn_sum=0.4,
    prefill_s=1.0,
    draft_prefill_s=0.5,
    draft_s=0.5,
    verify_s=1.5,
    retrieval_s=0.25,
    other_s=0.25,
    ttft_s=1.5,
    decode_s=2.5,
)
PLAIN = DecodingStats(
    num_prompt_tokens=5000, num_output_tokens=11, num_plain_steps=10, prefill_s=3, verify_s=3, ttft_s=3, decode_s=2.5
)


FIGURES = {
    "tokens": {"prompt": 6000, "cached": 200, "output": 32},
    "acceptance": {
        "mean_acceptance_length": 2.25,
        "draft_acceptance_rate": 10 / 64,
        "speculative_share": 0.4,
        "mean_tree_size": 8,
        "first_acceptance_rate": 5 / 7,
    },
    "retrieval": {"num_retrievals": 3, "coverage": 0.5, "churn": 0.2},
    "time": {"busy_s": 10},
    "speed": {"decode_tokens_per_s": 6, "end_to_end_tokens_per_s": 32 / 9.5, "tokens_per_busy_s": 3.2},
}


def test_sums_and_ratios_of_sums(tmp_path):
    """Of a document with drafts and a plain one, which has no retrievals; each is a bucket of its own."""
    made = [done_row(n, each, "host:1", NIGHT_S) for n, each in enumerate((DRAFTED, PLAIN))]
    CommitWriter(resolve(str(tmp_path)), FIRST).commit(made)
    report = build_report(str(tmp_path))
    for section, figures in FIGURES.items():
        assert {name: report[section][name] for name in figures} == pytest.approx(figures)
    assert [report["acceptance"][name] for name in ("histogram", "at_least")] == [[2, 2, 4], [1, 0.75, 0.5]]
    assert [report["time"]["shares"][phase] for phase in ("prefill", "verify")] == [0.4, 0.45]
    assert [(each["bucket"], each["decode_tokens_per_s"]) for each in report["buckets"]] == [("1K", 8), ("8K", 4)]
    spread = report["per_document"]["total_s"]
    assert [spread[name] for name in ("n", "median", "mean", "min", "max")] == [2, 4.75, 4.75, 4, 5.5]


def test_rows_count_once_and_for_the_worker_and_the_start_that_did_them(report):
    """Some failed before they were done, and texts that are shown are drawn by their ids."""
    assert report["rows"] == {"input": 300, "done": 293, "errors": 7, "pending": 0}
    assert report["workers"] == {"host:11": 151, "host:1": 60, "host:12": 42, "host:2": 25, "host:3": 15}
    assert [(each["run_id"], each["documents"]) for each in report["starts"]] == [(FIRST, 100), (SECOND, 193)]
    drawn, flagged = ([text["doc_id"] for text in report["texts"][kind]] for kind in ("random", "flagged"))
    assert len({*drawn, *flagged}) == 6
    assert all(text["quality_flags"] for text in report["texts"]["flagged"])


def test_what_the_paid_time_was_spent_on(report):
    """The kinds add up to all of it; the clock ran until a driver's last heartbeat or its end."""
    found = report["wall_clock"]
    paid = found["paid_s"]
    assert sum(paid.values()) == pytest.approx(PAID_S)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert paid["loading"] == pytest.approx((10 - 2) + (20 - 2) + 2 * (20 - 5))
    assert paid["dead"] == pytest.approx(80 - 60)
    rates = {"seconds": 118 + 430, "documents_per_hour": 3600 * 293 / 548, "gpu_hours": PAID_S / 7200}
    assert {name: found[name] for name in rates} == pytest.approx(rates)
    cost = {"total": PRICE * PAID_S / 3600, "per_thousand_documents": PRICE * PAID_S / 3.6 / 293}
    assert {name: found["cost"][name] for name in cost} == pytest.approx(cost)


def test_the_tail(report):
    """One long document at the end, for which one worker stayed and the other waited."""
    tail = report["tail"]
    assert [tail[name] for name in ("run_id", "documents", "workers", "idle_workers")] == [SECOND, 193, 2, 1]
    assert tail["last_worker_alone_s"] == tail["idle_median_s"] > 60


def one_worker(folder, made, workers=True):
    """A driver that was killed 100 s after it began, when its only worker had finished a few documents."""
    output = resolve(str(folder))
    clock = SetClock()
    record = StartRecord(output, FIRST, config_of(str(folder)), clock=clock)
    record.write()
    if workers:
        start_worker(record, clock, 1, 1, NIGHT_S - 2, NIGHT_S + 10)
        record.write()
    CommitWriter(output, FIRST).commit(made)
    return str(folder)


FEW = rows_of_worker(range(5), "host:1", NIGHT_S + 11)


def test_shares_of_the_limits(report, tmp_path):
    """What 800 tokens of a prompt compute in a second, and ten steps read in 1.5 s, of what the GPU could do. They are
    known of every document but those of the worker that measured nothing.
    """
    found = build_report(one_worker(tmp_path, [done_row(0, DRAFTED, "host:1", NIGHT_S + 11)]))["limits"]
    assert found["prefill_share"] == pytest.approx((2 * (800 * 7e9 + 5e8) + 524_288 * 800 * 1201 / 2) / 8e14)
    assert found["verify_share"] == pytest.approx((10 * 16e9 + 10 * (1000 + 21 / 2) * 131_072) / 4e12 / 1.5)
    assert report["limits"]["documents"] == report["rows"]["done"] - report["workers"]["host:2"]


def last_end(report):
    return report["timeline"][0]["workers"][0]["spans"][-1][1]


def test_the_last_sign_of_life_stands_for_an_end_that_nobody_wrote(tmp_path):
    """Killed with its machine: the lock still holds its heartbeat; without a lock, the last row says the most.

    So it does where the next start holds the lock while the report is made.
    """
    run = one_worker(tmp_path, FEW)
    lock = Path(run, "_run", "lock")
    report = build_report(run)
    before = report["starts"][0]["seconds"]
    assert before == pytest.approx(last_end(report), abs=1e-3)
    holder = {"run_id": SECOND, "heartbeat": NIGHT_S + 100, "host": "h", "pid": 1}
    lock.write_text(json.dumps(holder))
    assert build_report(run)["starts"][0]["seconds"] == before
    lock.write_text(json.dumps(holder | {"run_id": FIRST}))
    report = build_report(run)
    [start] = report["starts"]
    assert start["end"] is None
    assert start["seconds"] == 100.0
    assert start["last_sign"] == "2027-01-15T08:01:40.000+00:00"
    assert not report["wall_clock"]["is_exact"]
    assert start["paid_s"]["lost"] == pytest.approx(100 - last_end(report), abs=1e-3)


def test_a_worker_that_was_never_recorded_counts_what_its_rows_say(tmp_path):
    """The driver was killed before it wrote that the worker is ready: its documents were not for nothing."""
    report = build_report(one_worker(tmp_path, FEW, workers=False))
    paid = report["wall_clock"]["paid_s"]
    assert sum(paid.values()) == pytest.approx(report["time"]["busy_s"])
    [worker] = report["timeline"][0]["workers"]
    assert worker["worker"] == "host:1"
    assert worker["seat"] is None
    assert worker["documents"] == 5
