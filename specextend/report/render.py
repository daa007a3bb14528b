"""A run's report for readers."""

from __future__ import annotations

from typing import Any

from specextend.core import printable
from specextend.report.explain import PHASE_NAMES, why_not_faster
from specextend.report.tables import Section, markdown_table, number, percent, to_text


def render(report: dict[str, Any], width: int = 110) -> str:
    """The report as tables of a terminal, without colours."""
    return to_text(sections(report), why_not_faster(report), width)


def to_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [f"# Report of `{report['output']}`", ""]
    for section in sections(report):
        lines += [f"## {section.title}", "", *markdown_table(section), ""]
    if sentences := why_not_faster(report):
        lines += ["## Why not faster", "", *(f"- {sentence}" for sentence in sentences), ""]
    return "\n".join(lines)


def sections(report: dict[str, Any]) -> list[Section]:
    """The tables; one without rows is left out."""
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
    short = message if len(message) <= 200 else message[:199] + "…"
    return printable(f"{error['example_doc_id']}: {short}")


def _counted(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, number(rows)) for name, rows in counts.items()]
