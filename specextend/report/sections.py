"""The report for people: its tables, and sentences that explain why the run was not faster."""

from __future__ import annotations

from typing import Any

from specextend.report.tables import Section, markdown_table, markdown_text, number, percent, to_text

PHASE_NAMES = {
    "prefill": "target prefill",
    "draft_prefill": "draft prefill",
    "draft": "drafting",
    "verify": "verification",
    "retrieval": "retrieval",
    "other": "everything else",
}
LONGEST = 200
"""Most characters of an id or a message that a table shows."""


def render(report: dict[str, Any], width: int = 110) -> str:
    """Render the report as tables for a terminal, without colours."""
    return to_text(sections(report), why_not_faster(report), width)


def to_markdown(report: dict[str, Any]) -> str:
    """Render the report as Markdown."""
    lines = [f"# Report of {markdown_text(report['output'])}", ""]
    for section in sections(report):
        lines += [f"## {section.title}", "", *markdown_table(section), ""]
    if sentences := why_not_faster(report):
        lines += ["## Why not faster", "", *(f"- {sentence}" for sentence in sentences), ""]
    return "\n".join(lines)


def sections(report: dict[str, Any]) -> list[Section]:
    """Make the tables of the report; those without rows are left out."""
    tables = [
        _summary(report),
        _buckets(report),
        _time(report),
        Section("Finish reasons", ("reason", "rows"), _counted(report["finish_reasons"])),
        Section("Quality flags", ("flag", "rows"), _counted(report["quality_flags"])),
        _errors(report),
    ]
    return [table for table in tables if table.rows]


def _summary(report: dict[str, Any]) -> Section:
    rows, tokens, speed, acceptance = report["rows"], report["tokens"], report["speed"], report["acceptance"]
    named = {
        "rows in": number(rows["input"]),
        "rows done": number(rows["done"]),
        "rows failed": number(rows["errors"]),
        "rows to do": number(rows["pending"]),
        "prompt tokens": number(tokens["prompt"]),
        "output tokens": number(tokens["output"]),
        "dropped tokens": number(tokens["dropped"]),
        "mean acceptance length": number(acceptance["mean_acceptance_length"]),
        "draft tokens per speculative step": number(acceptance["mean_tree_size"], 1),
        "speculative steps": number(acceptance["num_spec_steps"]),
        "plain steps": number(acceptance["num_plain_steps"]),
        "decode tokens/s": number(speed["decode_tokens_per_s"], 1),
        "end-to-end tokens/s": number(speed["end_to_end_tokens_per_s"], 1),
        "output tokens per second of a worker": number(speed["tokens_per_busy_s"], 1),
        "retrieval coverage": percent(report["retrieval"]["coverage"]),
        "retrieval churn": percent(report["retrieval"]["churn"]),
    }
    return Section("Run", ("", "value"), [item for item in named.items() if item[1] != "-"])


def _buckets(report: dict[str, Any]) -> Section:
    header = ("prompt up to", "documents", "acceptance length", "decode tokens/s", "end-to-end tokens/s", "prefill")
    rows = [
        (
            bucket["bucket"],
            number(bucket["documents"]),
            number(bucket["mean_acceptance_length"]),
            number(bucket["decode_tokens_per_s"], 1),
            number(bucket["end_to_end_tokens_per_s"], 1),
            percent(bucket["time_shares"]["prefill"]),
        )
        for bucket in report["buckets"]
    ]
    return Section("By prompt length", header, rows)


def _time(report: dict[str, Any]) -> Section:
    busy = report["time"]["busy_s"]
    rows = [
        (PHASE_NAMES[name], percent(share), number(share * busy, 1))
        for name, share in report["time"]["shares"].items()
        if share is not None
    ]
    return Section("Where the time went", ("phase", "share", "seconds"), rows)


def _errors(report: dict[str, Any]) -> Section:
    rows = [
        (error["error_class"], error["stage"], number(error["rows"]), _example(error)) for error in report["errors"]
    ]
    return Section("Errors", ("class", "stage", "rows", "for example"), rows, ("stage", "for example"))


def _example(error: dict[str, Any]) -> str:
    message = " ".join(error["example_message"].split())
    return f"{_short(error['example_doc_id'])}: {_short(message)}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _counted(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, number(rows)) for name, rows in counts.items()]


def why_not_faster(report: dict[str, Any]) -> list[str]:
    """Explain in sentences where the time went, the largest cost first; return none if no time was measured."""
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
    """Describe work that was lost: no row contains the seconds of lost attempts."""
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
    """State the limit that prefill sets, by Amdahl's law."""
    prefill = shares["prefill"] + shares["draft_prefill"]
    if not prefill:
        return []
    return [f"Prefill takes {prefill:.0%}: with decoding for free the run would be {1 / prefill:.1f} times as fast."]


def _draft_cost(shares: dict[str, float], acceptance: dict[str, Any]) -> list[str]:
    """Compare what speculation costs with what it brings."""
    if acceptance["mean_acceptance_length"] is None or not shares["verify"]:
        return []
    cost = (shares["draft"] + shares["retrieval"]) / shares["verify"]
    return [
        f"A step brings {acceptance['mean_acceptance_length']:.2f} tokens; drafting and retrieval add "
        f"{cost:.0%} to the time of verification."
    ]
