"""Findings: each rule speaks up when it should, with the figures on which it rests, and not before."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from specextend.report.advice import RULES, give_advice

ROOT = Path(__file__).parents[2]
COUNTS = {"asked": 8, "seats": 8, "never_begun": 0, "ready": 8, "failed_to_start": 0, "died": 0}
QUIET: dict[str, Any] = {
    "rows": {"done": 100, "errors": 0},
    "errors": [],
    "tokens": {"prompt": 10_000, "cached": 0, "output": 1_000, "dropped": 0},
    "quality_flags": {},
    "audit": None,
    "limits": None,
    "time": {
        "shares": {"prefill": 0.1, "draft_prefill": 0.0, "draft": 0.2, "verify": 0.6, "retrieval": 0.05, "other": 0.05}
    },
    "acceptance": {
        "mean_acceptance_length": None,
        "num_spec_steps": 900,
        "num_plain_steps": 100,
        "num_fallbacks": 7,
    },
    "buckets": [],
    "retries": {"documents": 0, "memory": 0},
    "tail": None,
    "wall_clock": {"paid_s": None, "shares": None},
    "starts": [],
}
PAID = {"prefill": 10.0, "decode": 60.0, "other": 0.0, "waiting": 0.0, "lost": 0.0, "loading": 0.0, "dead": 0.0}


def changed(**values: Any) -> dict[str, Any]:
    """A report that gives no advice, with values at dotted paths replaced (`a__b` is `a.b`)."""
    report = copy.deepcopy(QUIET)
    for path, value in values.items():
        *sections, name = path.split("__")
        section = report
        for each in sections:
            section = section[each]
        section[name] = value
    return report


def paid(**seconds: float) -> dict[str, Any]:
    spent = PAID | seconds
    return {"paid_s": spent, "shares": {kind: value / sum(spent.values()) for kind, value in spent.items()}}


def bucket(name: str, length: float | None) -> dict[str, Any]:
    return {"bucket": name, "mean_acceptance_length": length}


def started(forecast: Any = None, **counts: int) -> dict[str, Any]:
    return {"workers": COUNTS | counts, "forecast": forecast}


TAIL = {"idle_workers": 2, "workers": 8, "idle_median_s": 2400.0, "idle_worker_s": 4800.0}
FAILED = {"error_class": "PromptTooLong", "stage": "prompt", "rows": 10, "retryable": False}
MISSED = {"actual_over_predicted": 1.8, "actual_s": 5400.0, "predicted_s": 3000.0}
AUDIT = {"documents": 40, "different": 0, "largest_gap": 7.2, "speedup": None}
SLOWER = {"documents": 38, "decode": 0.8}
LIMITS = {"documents": 3, "prefill_share": 1.2, "verify_share": 0.4, "devices": []}
CASES = [
    ("most_failed", changed(rows__errors=12, errors=[FAILED]), "12 documents failed, 10 of them with PromptTooLong"),
    ("prefill_bound", changed(time__shares__prefill=0.61), "61% of the work is prefill: .* 1.6 times as fast"),
    ("drafting_cost", changed(acceptance__mean_acceptance_length=2.5), "2.50 tokens; drafting and retrieval add 42%"),
    ("drafting_cost", changed(acceptance__mean_acceptance_length=1.4), "hardly pays: try fewer tree.nodes"),
    ("plain_steps", changed(acceptance__num_plain_steps=600), "40% of the steps were plain .* given up 7 times"),
    (
        "acceptance_falls",
        changed(buckets=[bucket("1K", 2.4), bucket("2K", None), bucket("16K", 1.6)]),
        r"falls from 2.40 \(prompts up to 1K\) to 1.60 \(up to 16K\)",
    ),
    ("idle_tail", changed(tail=TAIL), "2 of 8 workers stood idle for 40 min 00 s at the end"),
    ("waiting", changed(wall_clock=paid(waiting=30.0)), "without work for 30% of the paid time"),
    ("loading", changed(wall_clock=paid(loading=30.0)), "30% of the paid time went into loading"),
    (
        "deaths",
        changed(starts=[started(died=3, failed_to_start=1)], wall_clock=paid(dead=7.0)),
        "4 workers died .* 7.00 s of worker time passed, 9.1%",
    ),
    ("deaths", changed(starts=[started(died=1)]), "1 worker died or could not be built; the log says why.$"),
    ("no_room", changed(starts=[started(never_begun=2)]), "2 of 8 workers never got a process"),
    ("tried_again", changed(retries__documents=2), "2 documents took a second attempt or more; the log says why."),
    ("memory_ran_out", changed(retries__memory=3), "began again 3 times because memory ran out: lower"),
    ("truncated", changed(quality_flags={"truncated": 8}), r"8% of the texts were cut at max_new_tokens \(8\)"),
    ("repeated", changed(quality_flags={"repeated": 3}), r"3% of the texts end in a loop \(3\)"),
    ("empty", changed(quality_flags={"empty": 1}), r"The text of 1 document is empty \(1.0%\)"),
    ("texts_differ", changed(audit=AUDIT | {"different": 3}), "3 of 40 audited documents .* by up to 7.20 logits"),
    ("slower_than_plain", changed(audit=AUDIT | {"speedup": SLOWER}), "On 38 audited documents .* 0.80 times as fast"),
    ("dropped", changed(tokens__dropped=2_500), "20% of the documents' tokens were dropped"),
    (
        "limits_too_low",
        changed(limits=LIMITS | {"prefill_share": 8.01}),
        "801% of the device's matrix rate.* to keep the higher",
    ),
    ("limits_too_low", changed(limits=LIMITS | {"verify_share": 1.44}), "144% of the device's memory bandwidth"),
    ("forecast_missed", changed(starts=[started(MISSED)]), "took 1 h 30 min, 1.8 times the forecast of 50 min 00 s"),
]


@pytest.mark.parametrize(("rule", "report", "says"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_says_what_it_found_with_its_figures(rule: str, report: dict[str, Any], says: str):
    """A finding without its number cannot be checked."""
    [advice] = [each for each in give_advice(report) if each["rule"] == rule]
    assert re.search(says, advice["says"]), advice["says"]
    assert advice["evidence"]
    assert "\n" not in advice["says"]


def test_every_rule_has_a_case_and_an_explanation():
    """A rule that nobody has seen speak may never do so; docs/report.md says when each one does."""
    names = {rule.__name__ for rule in RULES}
    assert names == {case[0] for case in CASES}
    page = (ROOT / "docs" / "report.md").read_text()
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_a_run_without_faults_gets_no_advice():
    """Findings that are always there are not read."""
    assert give_advice(changed()) == []


BELOW = [
    changed(time__shares__prefill=0.29),
    changed(acceptance__num_plain_steps=380),
    changed(buckets=[bucket("1K", 2.0), bucket("16K", 1.7)]),
    changed(wall_clock=paid(waiting=30.0), tail=TAIL | {"idle_workers": 0, "idle_worker_s": 28.0}),
    changed(wall_clock=paid(loading=7.0)),
    changed(quality_flags={"truncated": 4, "repeated": 1}),
    changed(tokens__dropped=500),
    changed(limits=LIMITS),
    changed(limits=LIMITS | {"prefill_share": None}),
    changed(audit=AUDIT | {"speedup": SLOWER | {"decode": 1.3}}),
    changed(starts=[started(MISSED | {"actual_over_predicted": 1.2})]),
    changed(starts=[started(MISSED | {"actual_over_predicted": None})]),
]


@pytest.mark.parametrize("report", BELOW, ids=range(len(BELOW)))
def test_what_is_as_usual_is_not_mentioned(report: dict[str, Any]):
    """Each rule has a threshold, and time at the end of the run counts once."""
    assert give_advice(report) == []
