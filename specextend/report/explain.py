"""Why not faster: what a run's own time shares say, in sentences."""

from __future__ import annotations

from typing import Any

PHASE_NAMES = {
    "prefill": "target prefill",
    "draft_prefill": "draft prefill",
    "draft": "drafting",
    "verify": "verification",
    "retrieval": "retrieval",
    "other": "everything else",
}


def why_not_faster(report: dict[str, Any]) -> list[str]:
    """Sentences, the largest cost first; none for a run without time."""
    shares = {name: share for name, share in report["time"]["shares"].items() if share is not None}
    if not shares:
        return []
    largest = max(shares, key=lambda name: shares[name])
    return [
        f"{PHASE_NAMES[largest].capitalize()} takes {shares[largest]:.0%} of the workers' time, the most of all.",
        *_prefill_bound(shares),
        *_draft_cost(shares, report["acceptance"]),
        *_done_again(report["retries"]),
    ]


def _done_again(retries: dict[str, int]) -> list[str]:
    """Work that was lost; the seconds of lost attempts are in no row."""
    said = []
    if retries["documents"]:
        said.append(f"{retries['documents']:,} documents took a second attempt or more; the log says why.")
    if retries["memory"]:
        said.append(
            f"Sequences began again {retries['memory']:,} times because memory ran out: "
            "lower decoding.max_batch_size or decoding.cache_gib."
        )
    return said


def _prefill_bound(shares: dict[str, float]) -> list[str]:
    """Amdahl's law: decoding cannot save what prefill takes."""
    prefill = shares["prefill"] + shares["draft_prefill"]
    if not prefill:
        return []
    return [f"Prefill takes {prefill:.0%}: with decoding for free the run would be {1 / prefill:.1f} times as fast."]


def _draft_cost(shares: dict[str, float], acceptance: dict[str, Any]) -> list[str]:
    """What speculation pays and what it gets."""
    if acceptance["mean_acceptance_length"] is None or not shares["verify"]:
        return []
    cost = (shares["draft"] + shares["retrieval"]) / shares["verify"]
    return [
        f"A step brings {acceptance['mean_acceptance_length']:.2f} tokens; drafting and retrieval add "
        f"{cost:.0%} to the time of verification."
    ]
