"""Findings: each rule speaks up when it should, with the figures on which it rests, and not before."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from specextend.report.advice import RULES, give_advice

ROOT = Path(__file__).parents[2]
QUIET: dict[str, Any] = {
    "rows": {"done": 100, "errors": 0},
    "errors": [],
    "tokens": {"prompt": 10_000, "cached": 0, "output": 1_000, "dropped": 0},
    "quality_flags": {},
    "audit": None,
    "time": {
        "shares": {"prefill": 0.1, "draft_prefill": 0.0, "draft": 0.2, "verify": 0.6, "retrieval": 0.05, "other": 0.05}
    },
    "acceptance": {"mean_acceptance_length": None},
    "buckets": [],
    "tail": None,
    "wall_clock": {"shares": None},
}


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


def bucket(name: str, length: float | None) -> dict[str, Any]:
    return {"bucket": name, "mean_acceptance_length": length}


TAIL = {"idle_workers": 2, "workers": 8, "idle_median_s": 2400.0}
FAILED = {"error_class": "PromptTooLong", "stage": "prompt", "rows": 10, "retryable": False}
AUDIT = {"documents": 40, "different": 0, "largest_gap": 7.2, "speedup": None}
SLOWER = {"documents": 38, "decode": 0.8}
CASES = [
    ("most_failed", changed(rows__errors=12, errors=[FAILED]), "12 documents failed, 10 of them with PromptTooLong"),
    ("texts_differ", changed(audit=AUDIT | {"different": 3}), "3 of 40 audited documents .* by up to 7.20 logits"),
    ("truncated", changed(quality_flags={"truncated": 8}), r"8% of the texts were cut at max_new_tokens \(8\)"),
    ("dropped", changed(tokens__dropped=2_500), "20% of the documents' tokens were dropped"),
    ("prefill_bound", changed(time__shares__prefill=0.61), "61% of the work is prefill: .* 1.6 times as fast"),
    ("slower_than_plain", changed(audit=AUDIT | {"speedup": SLOWER}), "On 38 audited documents .* 0.80 times as fast"),
    ("drafting_cost", changed(acceptance__mean_acceptance_length=2.5), "2.50 tokens; drafting and retrieval add 42%"),
    ("drafting_cost", changed(acceptance__mean_acceptance_length=1.4), "hardly pays: try fewer tree.nodes"),
    (
        "acceptance_falls",
        changed(buckets=[bucket("1K", 2.4), bucket("2K", None), bucket("16K", 1.6)]),
        r"falls from 2.40 \(prompts up to 1K\) to 1.60 \(up to 16K\)",
    ),
    ("idle_tail", changed(tail=TAIL), "2 of 8 workers stood idle for 40 min 00 s at the end"),
    ("loading", changed(wall_clock__shares={"loading": 0.3}), "30% of the paid time went into loading"),
]
BELOW = [
    changed(),
    changed(quality_flags={"truncated": 4}),
    changed(audit=AUDIT | {"speedup": SLOWER | {"decode": 1.3}}),
    changed(buckets=[bucket("1K", 2.0), bucket("16K", 1.7)]),
]


@pytest.mark.parametrize(("rule", "report", "said"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_says_what_it_found_with_its_figures(rule: str, report: dict[str, Any], said: str):
    """A finding without figures cannot be checked."""
    [advice] = give_advice(report)
    assert advice["rule"] == rule
    assert re.search(said, advice["says"])
    assert advice["evidence"]


@pytest.mark.parametrize("report", BELOW, ids=range(len(BELOW)))
def test_what_is_as_usual_is_not_mentioned(report: dict[str, Any]):
    """Findings that are always there are not read."""
    assert give_advice(report) == []


def test_every_rule_has_a_case_and_an_explanation():
    """A rule that nobody has seen speak may never do so; docs/planning-and-report.md says when."""
    names = {rule.__name__ for rule in RULES}
    assert names == {case[0] for case in CASES}
    page = (ROOT / "docs" / "planning-and-report.md").read_text()
    assert {name for name in names if f"`{name}`" not in page} == set()
