"""Advice: rules that look at the figures of a report, and say what spoils its texts or holds the run back.

A rule returns a sentence and the figures on which it rests; None if there is nothing to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specextend.core import counted
from specextend.report.sections import duration, number
from specextend.stats import ratio

Report = Mapping[str, Any]
Finding = tuple[str, dict[str, float | int | str]]


def give_advice(report: Report) -> list[dict[str, Any]]:
    """Apply every rule to a report, in the order in which a reader should look at the findings."""
    found = ((rule.__name__, rule(report)) for rule in RULES)
    return [{"rule": rule, "says": each[0], "evidence": each[1]} for rule, each in found if each is not None]


def most_failed(report: Report) -> Finding | None:
    """Name the most frequent error."""
    failed = report["rows"]["errors"]
    if not failed:
        return None
    first = report["errors"][0]
    kinds = f"{first['error_class']} ({first['stage']})"
    retry = "--retry-errors does them again" if first["retryable"] else "another try would fail in the same way"
    says = f"{counted(failed, 'document')} failed, {number(first['rows'])} of them with {kinds}: {retry}."
    return says, {"failed": failed, "rows": first["rows"], "error_class": first["error_class"]}


def texts_differ(report: Report) -> Finding | None:
    """Say that plain decoding gives other texts."""
    audit = report["audit"]
    if audit is None or not audit["different"]:
        return None
    different, gap = audit["different"], audit["largest_gap"]
    says = (
        f"{different:,} of {counted(audit['documents'], 'audited document')} differed from "
        f"plain decoding by more than rounding, by up to {gap:.2f} logits: speculation must not change texts. Set "
        "decoding.mode autoregressive and report it."
    )
    return says, {"documents": audit["documents"], "different": different, "gap": gap}


def truncated(report: Report) -> Finding | None:
    """Say that many texts were cut."""
    rows = report["quality_flags"].get("truncated", 0)
    share = ratio(rows, report["rows"]["done"]) or 0.0
    if share < 0.05:
        return None
    says = f"{share:.0%} of the texts were cut at max_new_tokens ({number(rows)}): raise decoding.max_new_tokens."
    return says, {"documents": rows, "share": share}


def dropped(report: Report) -> Finding | None:
    """Say that a large part of the documents was not read."""
    tokens = report["tokens"]
    share = ratio(tokens["dropped"], tokens["dropped"] + tokens["prompt"])
    if share is None or share < 0.05:
        return None
    says = (
        f"{share:.0%} of the documents' tokens were dropped because prompts were too long: the texts cannot say what "
        "was there. Raise prompt.max_prompt_tokens, take a target with a longer context, or set "
        "prompt.length_policy to parts, which reads long documents in parts."
    )
    return says, {"dropped_share": share}


def prefill_bound(report: Report) -> Finding | None:
    """State the limit that prefill sets to any speed-up of decoding, by Amdahl's law."""
    shares = _phases(report)
    if shares is None or (prefill := shares["prefill"] + shares["draft_prefill"]) < 0.3:
        return None
    limit = 1 / prefill
    says = (
        f"{prefill:.0%} of the work is prefill: with decoding for free the run would be {limit:.1f} times as fast, so "
        "speculation cannot give more than that here."
    )
    return says, {"prefill_share": prefill, "limit": limit}


def slower_than_plain(report: Report) -> Finding | None:
    """Say that plain decoding was measured to be faster."""
    speedup = (report["audit"] or {}).get("speedup")
    if speedup is None or speedup["decode"] is None or speedup["decode"] >= 1:
        return None
    documents, factor = speedup["documents"], speedup["decode"]
    says = (
        f"On {counted(documents, 'audited document')} decoding was {factor:.2f} times as fast as without a "
        "draft: decoding.mode autoregressive, or another draft, would be faster here."
    )
    return says, {"documents": documents, "speedup": factor}


def drafting_cost(report: Report) -> Finding | None:
    """Compare what a speculative step brings with what it costs, in verifications."""
    shares, length = _phases(report), report["acceptance"]["mean_acceptance_length"]
    if shares is None or length is None or not shares["verify"]:
        return None
    cost = (shares["draft"] + shares["retrieval"]) / shares["verify"]
    says = f"A speculative step brings {length:.2f} tokens; drafting and retrieval add {cost:.0%} to its verification."
    if length < 1.1 * (1 + cost):
        says += " That hardly pays: try fewer tree.nodes, decoding.mode autoregressive, or another draft."
    return says, {"acceptance_length": length, "cost": cost}


def acceptance_falls(report: Report) -> Finding | None:
    """Say that long prompts are accepted much worse than short ones."""
    known = [bucket for bucket in report["buckets"] if bucket["mean_acceptance_length"] is not None]
    if len(known) < 2:
        return None
    best, last = max(known, key=lambda bucket: bucket["mean_acceptance_length"]), known[-1]
    low, high = last["mean_acceptance_length"], best["mean_acceptance_length"]
    if low > 0.8 * high:
        return None
    says = (
        f"The acceptance length falls from {high:.2f} (prompts up to {best['bucket']}) to {low:.2f} (up to "
        f"{last['bucket']}): a larger cache.top_k_chunks lets the draft see more of long prompts."
    )
    return says, {"best": high, "longest": low, "bucket": last["bucket"]}


def idle_tail(report: Report) -> Finding | None:
    """Say that workers had nothing to do while the last documents were decoded."""
    tail = report["tail"]
    if tail is None or not tail["idle_workers"]:
        return None
    idle, workers, seconds = tail["idle_workers"], tail["workers"], tail["idle_median_s"]
    says = (
        f"{idle:,} of {counted(workers, 'worker')} stood idle for {duration(seconds)} at the end, while the last "
        "documents were decoded: fewer workers would have finished almost as soon; more documents in one run make the "
        "end matter less."
    )
    return says, {"idle_workers": idle, "workers": workers, "idle_s": seconds}


def loading(report: Report) -> Finding | None:
    """Say that loading models took a large part of the paid time."""
    share = (report["wall_clock"]["shares"] or {}).get("loading", 0.0)
    if share < 0.1:
        return None
    says = (
        f"{share:.0%} of the paid time went into loading models: give a start more documents or fewer workers, or keep "
        "the weights on a local disk."
    )
    return says, {"loading_share": share}


RULES: tuple[Callable[[Report], Finding | None], ...] = (
    most_failed,
    texts_differ,
    truncated,
    dropped,
    prefill_bound,
    slower_than_plain,
    drafting_cost,
    acceptance_falls,
    idle_tail,
    loading,
)
"""What spoils texts first, then what costs time; docs/planning-and-report.md names them."""


def _phases(report: Report) -> dict[str, float] | None:
    """Return the share of each phase; None if no time was measured."""
    shares = report["time"]["shares"]
    return None if any(share is None for share in shares.values()) else shares
