"""The tables of the report, as text for a terminal and as Markdown."""

from __future__ import annotations

from typing import Any

from specextend.core import counted
from specextend.report.tables import (
    Section,
    duration,
    markdown_table,
    markdown_text,
    number,
    percent,
    shortened,
    to_grid,
    to_text,
)

MOST_FINDINGS = 3
"""Findings that the end of a run shows."""
MOST_CLASSES = 5
"""Classes of errors that the end of a run names."""
PHASE_NAMES = {
    "prefill": "target prefill",
    "draft_prefill": "draft prefill",
    "draft": "drafting",
    "verify": "verification",
    "retrieval": "retrieval",
    "other": "everything else",
}
KIND_NAMES = {
    "prefill": "prefill",
    "decode": "decoding",
    "other": "everything else at work",
    "audit": "decoding again for the audit",
    "waiting": "waiting for documents",
    "lost": "lost with a worker or a stop",
    "loading": "loading models",
    "dead": "replacing workers",
}


def render(report: dict[str, Any], width: int = 110) -> str:
    """Render the report as tables for a terminal, without colours."""
    return to_text(sections(report), advice_lines(report), width)


def render_outcome(report: dict[str, Any], width: int = 110) -> str:
    """Render in about fifteen lines what a run has done: rows, failures and why, speed, the first findings."""
    rows, clock, advice = report["rows"], report["wall_clock"], advice_lines(report)
    length, more = report["acceptance"]["mean_acceptance_length"], len(advice) - MOST_FINDINGS
    of_all = "" if rows["input"] is None else f" of {rows['input']:,}"
    known = {
        "rows done": number(rows["done"]) + of_all,
        "rows failed": _failures(report),
        "time of all starts": duration(clock["seconds"]),
        "documents an hour": number(clock["documents_per_hour"], 1),
        "mean acceptance length": number(length),
        "decode tokens/s": number(report["speed"]["decode_tokens_per_s"], 1),
    }
    outcome = [(name, value) for name, value in known.items() if value != "-"]
    outcome += [("finding", says) for says in advice[:MOST_FINDINGS]]
    if more > 0:
        outcome.append(("", f"{counted(more, 'more finding')} in the report"))
    return to_grid(outcome, width)


def _failures(report: dict[str, Any]) -> str:
    """Count the failed rows by class, with an example of the most frequent one."""
    failed, errors = number(report["rows"]["errors"]), report["errors"]
    if not errors:
        return failed
    classes = ", ".join(f"{error['rows']:,} {error['error_class']}" for error in errors[:MOST_CLASSES])
    return f"{failed}: {classes}{', ...' if errors[MOST_CLASSES:] else ''}; for example {_example(errors[0])}"


def to_markdown(report: dict[str, Any]) -> str:
    """Render the report as Markdown."""
    lines = [f"# Report of {markdown_text(report['output'])}", ""]
    for section in sections(report):
        lines += [f"## {section.title}", "", *markdown_table(section), ""]
    if sentences := advice_lines(report):
        lines += ["## Findings", "", *(f"- {markdown_text(sentence)}" for sentence in sentences), ""]
    return "\n".join(lines)


def advice_lines(report: dict[str, Any]) -> list[str]:
    """Return the sentences of the advice."""
    return [advice["says"] for advice in report["advice"]]


def sections(report: dict[str, Any]) -> list[Section]:
    """Make the tables of the report; those without rows are left out."""
    tables = [
        _summary(report),
        _wall_clock(report),
        paid_time(report),
        buckets(report),
        phases(report),
        limits(report),
        starts(report),
        slowest(report),
        Section("Finish reasons", ("reason", "rows"), _counted(report["finish_reasons"])),
        Section("Quality flags", ("flag", "rows"), _counted(report["quality_flags"])),
        texts(report),
        audit(report),
        errors(report),
    ]
    return [table for table in tables if table.rows]


def _summary(report: dict[str, Any]) -> Section:
    rows, tokens, speed, acceptance = report["rows"], report["tokens"], report["speed"], report["acceptance"]
    chosen = report["selection"] or {}
    named = {
        "rows in": number(rows["input"]),
        "rows of the whole input": number(chosen.get("input")),
        "rows left out, done before and unchanged": number(chosen.get("unchanged")),
        "rows in that had changed": number(chosen.get("changed")),
        "rows in that were new": number(chosen.get("new")),
        "rows done": number(rows["done"]),
        "rows copied from rows with an equal text": number(rows.get("copied") or None),
        "rows failed": number(rows["errors"]),
        "rows to do": number(rows["pending"]),
        "prompt tokens": number(tokens["prompt"]),
        "prompt tokens that were read for another prompt": number(tokens["cached"] or None),
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
    return _named("Run", named)


def _wall_clock(report: dict[str, Any]) -> Section:
    clock, tail = report["wall_clock"], report["tail"] or {}
    cost = clock["cost"] or {}
    named = {
        "time of all starts": duration(clock["seconds"]),
        "documents an hour": number(clock["documents_per_hour"], 1),
        "prompt tokens/s of the job": number(clock["prompt_tokens_per_s"], 1),
        "output tokens/s of the job": number(clock["output_tokens_per_s"], 1),
        "worker hours": number(clock["worker_hours"]),
        "GPU hours": number(clock["gpu_hours"] or None),
        "cost": number(cost.get("total")),
        "cost of 1,000 documents": number(cost.get("per_thousand_documents")),
        "cost of 1,000,000 output tokens": number(cost.get("per_million_output_tokens")),
        "last 1% of the documents": duration(tail.get("last_percent_s")),
        "last worker alone": duration(tail.get("last_worker_alone_s")),
    }
    return _named("Wall clock", named)


def _named(title: str, named: dict[str, str]) -> Section:
    """Make a table of names and values, without those that have none."""
    return Section(title, ("", "value"), [item for item in named.items() if item[1] != "-"])


def paid_time(report: dict[str, Any]) -> Section:
    """Make the table of what the workers' time was spent on."""
    clock = report["wall_clock"]
    rows = [
        (KIND_NAMES[kind], percent(share), duration(clock["paid_s"][kind]))
        for kind, share in (clock["shares"] or {}).items()
        if share
    ]
    return Section("The workers' time", ("at", "share", "worker time"), rows)


def buckets(report: dict[str, Any]) -> Section:
    """Make the table of the prompt lengths."""
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


def phases(report: dict[str, Any]) -> Section:
    """Make the table of the phases of decoding."""
    busy = report["time"]["busy_s"]
    rows = [
        (PHASE_NAMES[name], percent(share), number(share * busy, 1))
        for name, share in report["time"]["shares"].items()
        if share is not None
    ]
    return Section("Where the time of the work went", ("phase", "share", "seconds"), rows)


def starts(report: dict[str, Any]) -> Section:
    """Make the table of the starts."""
    header = ("start", "began", "took", "exit", "documents", "documents an hour", "worker hours", "forecast")
    rows = [
        (
            start["run_id"],
            (start["begin"] or "-")[:19].replace("T", " "),
            duration(start["seconds"]) + (" (last sign of life)" if start["last_sign"] else ""),
            "not recorded" if start["exit_code"] is None else str(start["exit_code"]),
            number(start["documents"]),
            number(start["documents_per_hour"], 1),
            number(start["worker_hours"]),
            duration((start["forecast"] or {}).get("predicted_s")),
        )
        for start in report["starts"]
    ]
    return Section("Starts", header, rows, ("began", "took"))


def slowest(report: dict[str, Any]) -> Section:
    """Make the table of the slowest documents."""
    header = ("document", "took", "prompt tokens", "output tokens", "prefill", "attempts", "worker")
    rows = [
        (
            shortened(document["doc_id"] or ""),
            duration(document["total_s"]),
            number(document["num_prompt_tokens"]),
            number(document["num_output_tokens"]),
            duration(document["prefill_s"]),
            number(document["attempts"]),
            document["worker"] or "-",
        )
        for document in report["slowest"]
    ]
    return Section("Slowest documents", header, rows, ("worker",))


def texts(report: dict[str, Any]) -> Section:
    """Make the table of what was measured of each text."""
    named = {
        "copied_fraction": "share of runs of 8 words copied from the document",
        "rouge1": "ROUGE-1",
        "rouge2": "ROUGE-2",
        "rougeL": "ROUGE-L",
    }
    rows = [
        (about, number(spread["n"]), number(spread["median"], 3), number(spread["mean"], 3))
        for name, about in named.items()
        if (spread := report["per_document"].get(name)) is not None
    ]
    return Section("The texts measured", ("", "documents", "median", "mean"), rows)


def audit(report: dict[str, Any]) -> Section:
    """Make the table of the audit."""
    found = report["audit"]
    if found is None:
        return Section("Audit", ("", "value"), [])
    speedup = found["speedup"] or {}
    named = {
        "documents decoded again without a draft": number(found["documents"]),
        "of which failed": number(found["failed"] or None),
        "equal to the last token": number(found["equal"]),
        "different where two tokens nearly tied": number(found["near_ties"]),
        "different by more than rounding": number(found["different"]),
        "tokens before the first difference": percent(found["token_agreement"]),
        "largest gap of a difference, in logits": number(found["largest_gap"], 3),
        "speed-up of decoding": number(speedup.get("decode")),
        "speed-up end to end": number(speedup.get("end_to_end")),
        "speed-up measured on documents": number(speedup.get("documents")),
        "decoded together": number(speedup.get("batch_size")),
        "worker time": duration(found["seconds"]),
    }
    return _named("Audit", named)


def limits(report: dict[str, Any]) -> Section:
    """Make the table of what was reached of what the devices can do."""
    found = report["limits"]
    if found is None:
        return Section("Beside the limits of the device", ("", "value"), [])
    named = {
        "prefill, share of the matrix rate": percent(found["prefill_share"]),
        "verification, share of the memory bandwidth": percent(found["verify_share"]),
        "over documents": number(found["documents"]),
    }
    for device in found["devices"]:
        rate, bandwidth = (number(device[name] / 1e9, 1) for name in ("flop_per_s", "read_bytes_per_s"))
        named[f"{device['device']}, workers: {device['workers']}"] = f"{rate} GFLOP/s, {bandwidth} GB/s"
    return _named("Beside the limits of the device", named)


def errors(report: dict[str, Any]) -> Section:
    """Make the table of the errors."""
    rows = [
        (error["error_class"], error["stage"], number(error["rows"]), _example(error)) for error in report["errors"]
    ]
    return Section("Errors", ("class", "stage", "rows", "for example"), rows, ("stage", "for example"))


def _example(error: dict[str, Any]) -> str:
    message = " ".join(error["example_message"].split())
    return f"{shortened(error['example_doc_id'])}: {shortened(message)}"


def _counted(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [(name, number(rows)) for name, rows in counts.items()]
