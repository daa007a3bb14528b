"""Advice: rules that look at the figures of a report, and say what holds the run back or spoils its texts.

A rule returns the figures on which it rests, and a sentence made from them; None if there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from specextend.core import counted
from specextend.report.tables import duration, number, percent
from specextend.stats import ratio

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding."""

    rule: str
    """Name of the rule, which docs/report.md explains."""
    says: str
    evidence: dict[str, float | int | str]


def give_advice(report: Report) -> list[dict[str, Any]]:
    """Apply every rule to a report, in the order in which a reader should look at the findings."""
    found = (rule(report) for rule in RULES)
    return [asdict(advice) for advice in found if advice is not None]


def most_failed(report: Report) -> Advice | None:
    """Name the most frequent error."""
    failed = report["rows"]["errors"]
    if not failed:
        return None
    first = report["errors"][0]
    kinds = f"{first['error_class']} ({first['stage']})"
    retry = "--retry-errors does them again" if first["retryable"] else "another try would fail in the same way"
    says = f"{counted(failed, 'document')} failed, {number(first['rows'])} of them with {kinds}: {retry}."
    return Advice("most_failed", says, {"failed": failed, "rows": first["rows"], "error_class": first["error_class"]})


def prefill_bound(report: Report) -> Advice | None:
    """State the limit that prefill sets to any speed-up of decoding, by Amdahl's law."""
    shares = _phases(report)
    if shares is None or (prefill := shares["prefill"] + shares["draft_prefill"]) < 0.3:
        return None
    limit = 1 / prefill
    says = (
        f"{prefill:.0%} of the work is prefill: with decoding for free the run would be {limit:.1f} times as fast, so "
        "speculation cannot give more than that here."
    )
    return Advice("prefill_bound", says, {"prefill_share": prefill, "limit": limit})


def drafting_cost(report: Report) -> Advice | None:
    """Compare what a speculative step brings with what it costs, in verifications."""
    shares, length = _phases(report), report["acceptance"]["mean_acceptance_length"]
    if shares is None or length is None or not shares["verify"]:
        return None
    cost = (shares["draft"] + shares["retrieval"]) / shares["verify"]
    says = f"A speculative step brings {length:.2f} tokens; drafting and retrieval add {cost:.0%} to its verification."
    if length < 1.1 * (1 + cost):
        says += " That hardly pays: try fewer tree.nodes, decoding.mode autoregressive, or another draft."
    return Advice("drafting_cost", says, {"acceptance_length": length, "cost": cost})


def plain_steps(report: Report) -> Advice | None:
    """Say that speculation was often given up."""
    acceptance = report["acceptance"]
    steps = acceptance["num_spec_steps"] + acceptance["num_plain_steps"]
    share = ratio(acceptance["num_plain_steps"], steps)
    if share is None or share < 0.3 or not acceptance["num_spec_steps"]:
        return None
    fallbacks = acceptance["num_fallbacks"]
    says = (
        f"{share:.0%} of the steps were plain ones: speculation was given up {counted(fallbacks, 'time')}, because "
        "plain steps were expected to be faster there."
    )
    return Advice("plain_steps", says, {"plain_share": share, "fallbacks": fallbacks})


def acceptance_falls(report: Report) -> Advice | None:
    """Say that long prompts are accepted much worse than short ones."""
    known = [bucket for bucket in report["buckets"] if bucket["mean_acceptance_length"] is not None]
    if len(known) < 2:
        return None
    best, last = max(known, key=lambda bucket: bucket["mean_acceptance_length"]), known[-1]
    if last["mean_acceptance_length"] > 0.8 * best["mean_acceptance_length"]:
        return None
    low, high = last["mean_acceptance_length"], best["mean_acceptance_length"]
    says = (
        f"The acceptance length falls from {high:.2f} (prompts up to {best['bucket']}) to {low:.2f} (up to "
        f"{last['bucket']}): a larger cache.top_k_chunks lets the draft see more of long prompts."
    )
    return Advice("acceptance_falls", says, {"best": high, "longest": low, "bucket": last["bucket"]})


def idle_tail(report: Report) -> Advice | None:
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
    return Advice("idle_tail", says, {"idle_workers": idle, "workers": workers, "idle_s": seconds})


def waiting(report: Report) -> Advice | None:
    """Say that workers waited for documents before the end of the run."""
    paid = report["wall_clock"]["paid_s"]
    if not paid or not (total := sum(paid.values())):
        return None
    at_the_end = 0.0 if report["tail"] is None else report["tail"]["idle_worker_s"]
    share = max(0.0, paid["waiting"] - at_the_end) / total
    if share < 0.15:
        return None
    says = (
        f"Workers were ready and without work for {share:.0%} of the paid time, the end of the run left out: documents "
        "were not read or handed out fast enough, or attempts were lost."
    )
    return Advice("waiting", says, {"waiting_share": share})


def loading(report: Report) -> Advice | None:
    """Say that loading models took a large part of the paid time."""
    share = _paid_share(report, "loading")
    if share is None or share < 0.1:
        return None
    says = (
        f"{share:.0%} of the paid time went into loading models: give a start more documents or fewer workers, or keep "
        "the weights on a local disk."
    )
    return Advice("loading", says, {"loading_share": share})


def deaths(report: Report) -> Advice | None:
    """Say what workers that died cost."""
    counts = [start["workers"] for start in report["starts"] if start["workers"] is not None]
    died = sum(count["died"] + count["failed_to_start"] for count in counts)
    if not died:
        return None
    paid = report["wall_clock"]["paid_s"]
    dead, lost = (_paid_share(report, kind) for kind in ("dead", "lost"))
    says = f"{counted(died, 'worker')} died or could not be built; the log says why."
    evidence: dict[str, float | int | str] = {"died": died}
    if paid and dead is not None and lost is not None:
        seconds = duration(paid["dead"])
        says += f" Until others took their places {seconds} of worker time passed, {dead:.1%} of what was paid."
        evidence |= {"dead_share": dead, "lost_share": lost}
    return Advice("deaths", says, evidence)


def no_room(report: Report) -> Advice | None:
    """Say that the cluster had no room for some workers."""
    counts = [start["workers"] for start in report["starts"] if start["workers"] is not None]
    if not counts or not (without := counts[-1]["never_begun"]):
        return None
    asked = counts[-1]["asked"]
    of_all = f"{without:,} of {counted(asked, 'worker')}"
    says = f"{of_all} never got a process: the cluster had no room for them (job.workers)."
    return Advice("no_room", says, {"never_begun": without, "asked": asked})


def tried_again(report: Report) -> Advice | None:
    """Count documents that took several attempts: no row contains the seconds of lost ones."""
    again = report["retries"]["documents"]
    if not again:
        return None
    says = f"{counted(again, 'document')} took a second attempt or more; the log says why."
    return Advice("tried_again", says, {"documents": again})


def memory_ran_out(report: Report) -> Advice | None:
    """Say that sequences were begun again because memory ran out."""
    times = report["retries"]["memory"]
    if not times:
        return None
    says = (
        f"Sequences began again {counted(times, 'time')} because memory ran out: lower decoding.max_batch_size or "
        "decoding.cache_gib."
    )
    return Advice("memory_ran_out", says, {"times": times})


def truncated(report: Report) -> Advice | None:
    """Say that many texts were cut."""
    rows, share = _flagged(report, "truncated")
    if share < 0.05:
        return None
    says = f"{share:.0%} of the texts were cut at max_new_tokens ({number(rows)}): raise decoding.max_new_tokens."
    return Advice("truncated", says, {"documents": rows, "share": share})


def repeated(report: Report) -> Advice | None:
    """Say that texts end in loops."""
    rows, share = _flagged(report, "repeated")
    if share < 0.02:
        return None
    says = (
        f"{share:.0%} of the texts end in a loop ({number(rows)}): decoding.stop_repetition saves the tokens, another "
        "prompt or temperature the texts."
    )
    return Advice("repeated", says, {"documents": rows, "share": share})


def empty(report: Report) -> Advice | None:
    """Say that documents have no text."""
    rows, share = _flagged(report, "empty")
    if not rows:
        return None
    says = f"The text of {counted(rows, 'document')} is empty ({percent(share)}): look at them first."
    return Advice("empty", says, {"documents": rows, "share": share})


def texts_differ(report: Report) -> Advice | None:
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
    return Advice("texts_differ", says, {"documents": audit["documents"], "different": different, "gap": gap})


def slower_than_plain(report: Report) -> Advice | None:
    """Say that plain decoding was measured to be faster."""
    speedup = (report["audit"] or {}).get("speedup")
    if speedup is None or speedup["decode"] is None or speedup["decode"] >= 1:
        return None
    documents, factor = speedup["documents"], speedup["decode"]
    says = (
        f"On {counted(documents, 'audited document')} decoding was {factor:.2f} times as fast as without a "
        "draft: decoding.mode autoregressive, or another draft, would be faster here."
    )
    return Advice("slower_than_plain", says, {"documents": documents, "speedup": factor})


def dropped(report: Report) -> Advice | None:
    """Say that a large part of the documents was not read."""
    tokens = report["tokens"]
    share = ratio(tokens["dropped"], tokens["dropped"] + tokens["prompt"])
    if share is None or share < 0.05:
        return None
    says = (
        f"{share:.0%} of the documents' tokens were dropped because prompts were too long: the texts cannot say what "
        "was there. Raise prompt.max_prompt_tokens, take a target with a longer context, or set "
        "prompt.length_policy to chunk, which reads long documents in parts."
    )
    return Advice("dropped", says, {"dropped_share": share})


def forecast_missed(report: Report) -> Advice | None:
    """Say that a start took much longer or shorter than was forecast."""
    known = [start["forecast"] for start in report["starts"] if start["forecast"] is not None]
    off = known[-1]["actual_over_predicted"] if known else None
    if off is None or 0.75 <= off <= 1.33:
        return None
    actual, predicted = known[-1]["actual_s"], known[-1]["predicted_s"]
    says = f"The last start took {duration(actual)}, {off:.1f} times the forecast of {duration(predicted)}."
    return Advice("forecast_missed", says, {"actual_s": actual, "predicted_s": predicted, "ratio": off})


def limits_too_low(report: Report) -> Advice | None:
    """Say that more was reached of a device than was measured of it, so that the shares beside its limits are wrong."""
    found = report["limits"]
    if found is None:
        return None
    reached = {"matrix rate": found["prefill_share"], "memory bandwidth": found["verify_share"]}
    name, share = max(((name, share or 0.0) for name, share in reached.items()), key=lambda each: each[1])
    if share < 1.25:
        return None
    says = (
        f"The work reached {share:.0%} of the device's {name}: other processes were using the device when that was "
        "measured, which a start an hour later does again, to keep the higher value."
    )
    return Advice("limits_too_low", says, {"share": share, "limit": name})


RULES: tuple[Callable[[Report], Advice | None], ...] = (
    most_failed,
    texts_differ,
    empty,
    truncated,
    repeated,
    dropped,
    prefill_bound,
    slower_than_plain,
    drafting_cost,
    acceptance_falls,
    plain_steps,
    idle_tail,
    waiting,
    loading,
    deaths,
    no_room,
    tried_again,
    memory_ran_out,
    forecast_missed,
    limits_too_low,
)
"""What spoils texts first, then what costs time."""


def _phases(report: Report) -> dict[str, float] | None:
    """Return the share of each phase; None if no time was measured."""
    shares = report["time"]["shares"]
    return None if any(share is None for share in shares.values()) else shares


def _paid_share(report: Report, kind: str) -> float | None:
    shares = report["wall_clock"]["shares"]
    return None if shares is None else shares[kind]


def _flagged(report: Report, flag: str) -> tuple[int, float]:
    """Return how many texts have a quality flag, and their share."""
    rows = report["quality_flags"].get(flag, 0)
    return rows, ratio(rows, report["rows"]["done"]) or 0.0
