"""Findings: each rule speaks up when it should, with the figures on which it rests, and advises what can be changed."""

import copy
import re

import pytest

from specextend.report.advice import OF_TEXTS, OF_TIME, give_advice
from tests.job.conftest import text_of

TABLES = text_of("specextend/report/sections.py")
QUIET = {
    "rows": {"done": 100, "errors": 0},
    "errors": [],
    "tokens": {"prompt": 10_000, "cached": 0, "output": 1_000, "dropped": 0},
    "quality_flags": {},
    "flagged": {},
    "evidence": {},
    "figures": {"figures": 200, "rounded": 0, "derived": 0, "not_found": 0},
    "run": {
        "prompt": {"max_prompt_tokens": None, "length_policy": "middle"},
        "decoding": {"mode": "specextend", "stop_repetition": False},
        "tree": {"nodes": 16},
        "job": {"workers": 8},
    },
    "audit": None,
    "drafting": None,
    "time": {
        "shares": {"prefill": 0.1, "draft_prefill": 0.0, "draft": 0.2, "verify": 0.6, "retrieval": 0.05, "other": 0.05}
    },
    "acceptance": {
        "mean_acceptance_length": None,
        "speculative_share": 0.9,
        "num_network_steps": 1_000,
        "num_first_accepted": 300,
        "first_acceptance_rate": 0.3,
    },
    "buckets": [],
    "tail": None,
    "wall_clock": {"shares": None, "paid_s": None},
}


def changed(**values):
    """A report that gives no advice, with values at dotted paths replaced (`a__b` is `a.b`)."""
    report = copy.deepcopy(QUIET)
    for path, value in values.items():
        *sections, name = path.split("__")
        section = report
        for each in sections:
            section = section[each]
        section[name] = value
    return report


def bucket(name, length, documents=5, seen=0.6):
    return {"bucket": name, "documents": documents, "mean_acceptance_length": length, "retrieval_coverage": seen}


IDS = ["doc-a", "doc-b", "doc-c", "doc-d"]
TAIL = {"idle_workers": 2, "workers": 8, "idle_median_s": 2400.0, "documents": 90}
FAILED = {"error_class": "PromptTooLong", "stage": "prompt", "rows": 10, "retryable": False, "doc_ids": IDS}
LOST = {"n": 4, "median": 0.93, "min": 0.91, "max": 0.95}
CUT = {"quality_flags__truncated": 8, "flagged__truncated": IDS}
SET = {"run__decoding__stop_repetition": True}
RARE = {"acceptance__speculative_share": 0.05}
IN_PARTS = {"max_prompt_tokens": 4096, "length_policy": "parts"}
CASES = [
    (
        "not_in_document",
        changed(evidence={"a": {"strings": 40, "found": 4}, "b": {"strings": 10, "found": 4}}),
        "84% of 50 strings of the answers do not stand in their documents: check them.",
    ),
    (
        "figures_not_found",
        changed(figures__not_found=9, quality_flags__figure_not_found=8, flagged__figure_not_found=["doc-a"]),
        r"9 of 200 figures \(4%\), in 8 texts, cannot be found in the documents: check them .* doc-a.$",
    ),
    (
        "most_failed",
        changed(rows__errors=12, errors=[FAILED]),
        "12 .* 10 of them with PromptTooLong .* doc-a, doc-b, doc-c.$",
    ),
    (
        "truncated",
        changed(**CUT),
        "8 of 100 texts .* raise it, and do them again with --redo .list_contains.quality_flags, 'truncated'.*c.$",
    ),
    ("truncated", changed(**CUT, run__input={"options_column": "own"}), "tokens or the limit in column 'own': raise"),
    ("truncated", changed(**CUT, quality_flags__repeated=7), "repeat themselves, so set decoding.stop_repetition"),
    ("truncated", changed(**CUT, quality_flags__repeated=7, **SET), "max_new_tokens: raise it"),
    ("dropped", changed(tokens__dropped=2_500), "20% .* a longer context, or set prompt.length_policy to parts"),
    (
        "dropped",
        changed(tokens__dropped=2_500, run__prompt=IN_PARTS),
        "raise prompt.max_prompt_tokens, or [^,]* context.$",
    ),
    ("prefill_bound", changed(time__shares__prefill=0.61), "61% of the work .* is prefill, .* 1.6 times as fast"),
    ("prefill_bound", changed(time__shares__prefill=0.61, **RARE), "1.6 .* and only 5% of the steps were speculative"),
    ("drafts_lose", changed(drafting=LOST | {"n": 3}), r"In trials of 3 workers, .* 0.93 times .* \(0.91 to 0.95\)"),
    ("drafts_lose", changed(audit={"speedup": {"end_to_end": LOST}}), "In 4 turns of the audit .* 0.93 times"),
    (
        "draft_misses",
        changed(acceptance__num_first_accepted=299, run__draft={"kind": "model"}),
        r"0.30 of the draft's first tokens were accepted \(1,000 steps\), about 0.75 is usual: is this draft for",
    ),
    ("drafting_cost", changed(acceptance__mean_acceptance_length=1.4), "1.40 tokens; .* add 42% .* fewer tree.nodes"),
    (
        "drafting_cost",
        changed(acceptance__mean_acceptance_length=1.4, run__tree__nodes="auto"),
        "pays: try decoding.mode",
    ),
    (
        "acceptance_falls",
        changed(buckets=[bucket("1K", 2.4), bucket("2K", None), bucket("16K", 1.6)]),
        r"falls from 2.40 \(prompts up to 1K\) to 1.60 \(up to 16K\): a larger cache.top_k_chunks .* saw 60%",
    ),
    (
        "acceptance_falls",
        changed(buckets=[bucket("1K", 2.4), bucket("16K", 1.6, seen=1.0)]),
        "so only a draft for longer",
    ),
    ("idle_tail", changed(tail=TAIL), "2 of 8 workers stood idle for 40 min 00 s at the end"),
    (
        "loading",
        changed(wall_clock__shares={"loading": 0.3}),
        "30% .* more documents in each start, or take fewer workers",
    ),
    ("loading", changed(wall_clock__shares={"loading": 0.3}, run__job__workers=1), r"more documents in each start\.$"),
]
BELOW = [
    changed(),
    changed(evidence={"a": {"strings": 10, "found": 9}}),
    changed(quality_flags={"truncated": 4}),
    changed(rows__done=15, acceptance__num_first_accepted=0),
    changed(acceptance__num_network_steps=31, acceptance__num_first_accepted=0),
    changed(acceptance__mean_acceptance_length=2.5),
    changed(audit={"speedup": {"end_to_end": LOST | {"max": 0.99}}}, drafting=LOST | {"min": 0.98}),
    changed(buckets=[bucket("1K", 2.0), bucket("16K", 1.7)]),
    changed(buckets=[bucket("1K", 2.4), bucket("16K", 1.6, documents=1)]),
    changed(rows__done=1, time__shares__prefill=0.61, acceptance__mean_acceptance_length=1.4),
]


@pytest.mark.parametrize("rule, report, said", CASES)
def test_a_rule_says_what_it_found_with_its_figures(rule, report, said):
    """A finding without figures cannot be checked."""
    [advice] = give_advice(report)
    assert advice["rule"] == rule
    assert re.search(said, advice["says"])
    assert advice["evidence"]
    assert f'"{advice["section"]}"' in TABLES


@pytest.mark.parametrize("report", BELOW)
def test_what_is_as_usual_is_not_mentioned(report):
    """Findings that are always there are not read."""
    assert give_advice(report) == []


def test_the_heaviest_finding_comes_first():
    """Rows without a text before cut ones, and what spoils texts before what costs time."""
    failed = {"rows__errors": 1, "errors": [FAILED], "wall_clock__shares": {"loading": 0.9}}
    report = changed(**CUT, **failed, time__shares__prefill=0.5)
    rules = [advice["rule"] for advice in give_advice(report)]
    assert rules == ["most_failed", "truncated", "loading", "prefill_bound"]


def test_every_rule_has_a_case_and_an_explanation():
    """A rule that nobody has seen speak may never do so; docs/planning-and-report.md says when."""
    names = {rule.__name__ for rule in (*OF_TEXTS, *OF_TIME)}
    assert names == {case[0] for case in CASES}
    page = text_of("docs/planning-and-report.md")
    assert {name for name in names if f"`{name}`" not in page} == set()
