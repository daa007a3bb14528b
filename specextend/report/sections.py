"""Tables of a report for the page and the terminal. Begin at `sections`."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from specextend.core import ReadOnly, Values, counted, printable
from specextend.data.prompts import describe_cut
from specextend.stats import ratio

_MOST_VALUES = 20
"""Values shown for a field, most frequent first."""
LONGEST = 200
"""Most characters of an id or a message."""
MOST_FINDINGS = 3
MOST_CLASSES = 5
"""Findings and classes of errors at the end of a run."""
PHASE_NAMES = {
    "prefill": "target prefill",
    "draft_prefill": "draft prefill",
    "draft": "drafting",
    "verify": "verification",
    "retrieval": "retrieval",
    "other": "everything else",
}
KIND_NAMES = {
    "prefill": "prefill (reading prompts)",
    "decode": "decoding",
    "other": "everything else at work",
    "waiting": "waiting for documents",
    "lost": "lost with a worker or a stop",
    "loading": "loading models",
    "dead": "replacing workers",
}


@dataclass(frozen=True)
class Section:
    """A table. The first column and `text_columns` hold text, all others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[str] = ()
    about: str = ""
    """Explanation for readers."""


def number(value: float | None, digits: int = 2) -> str:
    """Format a number; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def amount(value: float) -> str:
    """Format hours or money."""
    return f"{value:.2g}" if value < 0.1 else number(value)


def percent(value: float | None) -> str:
    """Format a share as a percentage; `-` for None."""
    return "-" if value is None else f"{value:.1%}"


def duration(seconds: float) -> str:
    """Format seconds as `0.42 s`, `12.3 s`, `4 min 05 s` or `2 h 07 min`."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def shortened(text: str) -> str:
    """Cut an id, a name or a message to LONGEST characters."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def message(text: str) -> str:
    """Join the lines of a message."""
    return shortened(" ".join(text.split()))


def listed_ids(ids: Sequence[str]) -> str:
    """Join shortened ids."""
    return ", ".join(map(shortened, ids))


def moment(text: str) -> str:
    """Format a time of ISO 8601 to the second."""
    return text[:19].replace("T", " ")


tenths = partial(number, digits=1)
thousandths = partial(number, digits=3)


def in_turns(found: ReadOnly) -> str:
    """Format a speed-up with its range, and say if the range contains 1."""
    least, most = found["min"], found["max"]
    said = f"{found['median']:.2f} ({least:.2f} to {most:.2f} in {counted(found['n'], 'turn')})"
    return f"{said}, which shows no difference" if least <= 1 <= most else said


_UNITS: Mapping[str, Callable[[Any], str]] = {
    r"^audit\.speedup": in_turns,
    r"^(flop|read_bytes)_per_s$": lambda rate: tenths(rate / 1e9),
    r"per_(s|hour|busy_s)$|tree_size$|^memory_gib": tenths,
    r"(_s|seconds)$": duration,
    r"share|_rate$|coverage$|churn$|accuracy|interval|precision|recall|probability": percent,
    "^p$": "{:.2g}".format,
    r"hours$|\.cost\.": amount,
    "^(begin|last_sign)$": moment,
    "^(mean|median)$": thousandths,
    "^(commit|sha256)$": lambda name: shortened(name)[:12],
    "message$": message,
}
"""Formats by the unit in a name."""
Figures = Mapping[str, str]
"""Dotted paths of figures by their title."""
NOT_CHOSEN = {
    "not_redone": "not to be done again",
    "not_matching": "by input.filter",
    "not_in_sample": "by input.sample",
    "unchanged": "as done before and unchanged",
    "failed_before": "as failed before and unchanged",
    "over_limit": "by input.limit",
}
"""Reasons for rows that a selection left out."""
SELECTION: Figures = {
    "rows of the whole input": "selection.input",
    **{f"left out {why}": f"selection.{name}" for name, why in NOT_CHOSEN.items()},
    "rows in that had changed": "selection.changed",
    "rows in that were new": "selection.new",
}
RUN: Figures = {
    "rows in": "rows.input",
    "rows done": "rows.done",
    "rows failed": "rows.errors",
    "rows to do": "rows.pending",
    "rows that took several attempts": "retries.documents",
    "times that a row began again for want of memory": "retries.memory",
    "prompt tokens": "tokens.prompt",
    "prompt tokens that were read for another prompt": "tokens.cached",
    "output tokens": "tokens.output",
    "dropped tokens": "tokens.dropped",
    "mean acceptance length": "acceptance.mean_acceptance_length",
    "draft acceptance rate": "acceptance.draft_acceptance_rate",
    "first tokens of the draft network that were accepted": "acceptance.first_acceptance_rate",
    "draft tokens per speculative step": "acceptance.mean_tree_size",
    "speculative steps": "acceptance.num_spec_steps",
    "steps that were speculative": "acceptance.speculative_share",
    "plain steps": "acceptance.num_plain_steps",
    "times that speculation was given up": "acceptance.num_fallbacks",
    "times as fast as plain decoding, by the workers' trials": "drafting.median",
    "decode tokens/s of one text": "speed.decode_tokens_per_s",
    "end-to-end tokens/s of one text": "speed.end_to_end_tokens_per_s",
    "output tokens per second of a worker": "speed.tokens_per_busy_s",
    "retrieval coverage": "retrieval.coverage",
    "retrieval churn": "retrieval.churn",
}
WALL_CLOCK: Figures = {
    "time of all starts": "wall_clock.seconds",
    "documents an hour": "wall_clock.documents_per_hour",
    "prompt tokens/s of the job": "wall_clock.prompt_tokens_per_s",
    "output tokens/s of the job": "wall_clock.output_tokens_per_s",
    "worker hours": "wall_clock.worker_hours",
    "GPU hours": "wall_clock.gpu_hours",
    "cost": "wall_clock.cost.total",
    "cost of 1,000 documents": "wall_clock.cost.per_thousand_documents",
    "cost of 1,000,000 output tokens": "wall_clock.cost.per_million_output_tokens",
    "last 1% of the documents": "tail.last_percent_s",
    "last worker alone": "tail.last_worker_alone_s",
}
OUTCOME: Figures = {
    "time of all starts": "wall_clock.seconds",
    "documents an hour": "wall_clock.documents_per_hour",
    "mean acceptance length": "acceptance.mean_acceptance_length",
    "decode tokens/s of one text": "speed.decode_tokens_per_s",
}
"""Figures at the end of a run."""
AUDIT: Figures = {
    "documents decoded again, with a draft and without": "audit.documents",
    "of which failed": "audit.failed",
    "equal to the last token": "audit.equal",
    "different where two tokens nearly tied": "audit.near_ties",
    "different by more than rounding": "audit.different",
    "speed-up of decoding": "audit.speedup.decode",
    "speed-up end to end": "audit.speedup.end_to_end",
    "decoded together": "audit.batch_size",
}
VERDICTS: Figures = {
    "sentences whose support was asked for": "verdicts.asked",
    "probability of yes, tenth percentile (output.verify_below)": "verdicts.tenth_percentile",
}
LIMITS: Figures = {
    "prefill, share of the matrix rate": "limits.prefill_share",
    "verification, share of the memory bandwidth": "limits.verify_share",
    "over documents": "limits.documents",
}


BUCKET: Figures = {
    "prompt up to": "bucket",
    "documents": "documents",
    "acceptance length": "mean_acceptance_length",
    "decode tokens/s of one text": "decode_tokens_per_s",
    "end-to-end tokens/s of one text": "end_to_end_tokens_per_s",
    "prefill": "time_shares.prefill",
}
SLOW: Figures = {
    "document": "doc_id",
    "took": "total_s",
    "prompt tokens": "num_prompt_tokens",
    "output tokens": "num_output_tokens",
    "prefill": "prefill_s",
    "attempts": "attempts",
    "worker": "worker",
}
START: Figures = {
    "start": "run_id",
    "began": "begin",
    "took": "seconds",
    "exit": "exit_code",
    "last sign of life": "last_sign",
    "documents": "documents",
    "an hour": "documents_per_hour",
    "died": "workers.died",
    "planned GiB": "memory_gib.planned",
    "used": "memory_gib.used",
}
ERROR: Figures = {
    "class": "error_class",
    "stage": "stage",
    "rows": "rows",
    "for example": "doc_ids",
    "message": "example_message",
}
DEVICE: Figures = {
    "device": "device",
    "workers": "workers",
    "GFLOP/s": "flop_per_s",
    "GB/s": "read_bytes_per_s",
}
KERNEL: Figures = {
    "kernel": "name",
    "taken": "taken",
    "workers": "workers",
    "why": "why",
}
MODEL: Figures = {
    "model": "name",
    "asked for": "model",
    "commit": "commit",
    "hash of its files": "sha256",
}
INTERVAL: Figures = {"from": "interval.0", "to": "interval.1"}
PAID: Figures = {"spent on": "kind", "share": "share", "worker time": "seconds"}
PHASE: Figures = {"phase": "phase", "share": "share", "time": "seconds"}
DEPTH: Figures = {"at least": "depth", "share": "share"}
_ABOUT_DEPTHS = "Of the speculative steps, those that accepted so many draft tokens or more."
FLAG: Figures = {"flag": "name", "rows": "rows", "share": "share", "for example": "ids"}
ENDING: Figures = {"finish_reason": "name", "rows": "rows", "share": "share"}
EVIDENCE: Figures = {
    "field": "field",
    "filled": "filled_share",
    "strings": "strings",
    "in the document": "found_share",
}
CHOICE: Figures = {
    "field": "field",
    "value": "value",
    "documents": "documents",
    "share": "share",
    "mean probability": "probability",
}
GOLD: Figures = {
    "field": "field",
    "rows": "rows",
    "accuracy": "accuracy",
    **INTERVAL,
    "kappa": "kappa",
    "F1": "f1",
}
CALIBRATION: Figures = {
    "field": "field",
    "confidence": "probability",
    "rows": "rows",
    "accuracy": "accuracy",
    **INTERVAL,
}
LABEL: Figures = {
    "field": "field",
    "label": "label",
    "right answer": "gold",
    "answer": "answers",
    "precision": "precision",
    "recall": "recall",
}
CONFUSED: Figures = {"field": "0", "right answer": "1", "answer": "2", "rows": "3"}
REVIEWED: Figures = {
    "answers that are": "name",
    "in the run": "answers",
    "reviewed": "reviewed",
    "share": "share",
    **INTERVAL,
}
MEASURED: Figures = {
    "": "about",
    "documents": "n",
    "median": "median",
    "mean": "mean",
}
MEASURES = {
    "copied_fraction": "share of runs of 8 words copied from the document",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
}


def shown(path: str, value: Any) -> str:
    """Format a figure by the unit in its name or its type."""
    if value is None:
        return "-"
    if unit := next((unit for unit in _UNITS if re.search(unit, path)), None):
        return _UNITS[unit](value)
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return listed_ids(value)
        case str():
            return shortened(value)
    return number(value)


def look_up(report: ReadOnly, path: str) -> Any:
    """Return the value at a dotted path of keys and places, or None."""
    value: Any = report
    for key in path.split("."):
        if value is not None:
            value = value[int(key)] if key.isdigit() else value.get(key)
    return value


def num_texts(report: ReadOnly) -> int:
    """Count the documents with a text, including partial failures."""
    return int(report["rows"]["done"]) + (report.get("partial") or 0)


def cut_documents(report: ReadOnly) -> list[str]:
    """Describe the cut part of the documents in a line, if any."""
    tokens = report["tokens"]
    unread = ratio(tokens["dropped"], tokens["dropped"] + tokens["prompt"]) or 0.0
    return describe_cut(report["quality_flags"].get("shortened", 0), num_texts(report), unread)


def sections(report: ReadOnly) -> list[Section]:
    """Make the tables of the report without empty ones."""
    spreads = report["per_document"]
    models = look_up(report, "run.models") or {}
    measures = [
        {"about": MEASURES[name], **spreads[name]} for name in MEASURES if spreads.get(name)
    ]
    at_least = enumerate(report["acceptance"]["at_least"])
    depths = [{"depth": depth, "share": share} for depth, share in at_least if depth]
    named_models = [{"name": name, **model} for name, model in models.items()]
    of_work = [
        listed("Failed documents", ERROR, report["errors"], ("stage", "for example", "message")),
        *_of_texts(report),
        _named("Verdicts", VERDICTS if look_up(report, "verdicts.asked") else {}, report),
        listed("The texts measured", MEASURED, measures),
        _paid_time(report["wall_clock"]),
        listed("By prompt length", BUCKET, report["buckets"]),
        _named("Wall clock", WALL_CLOCK, report),
        _phases(report["time"]),
        listed("Accepted draft tokens", DEPTH, depths, about=_ABOUT_DEPTHS),
        _named("Run", RUN, report),
        _named("Audit", AUDIT, report, "A sample of the documents, decoded again in turns."),
        _named("Beside the limits of the device", LIMITS, report),
    ]
    tables = [
        *(of_work if report["rows"]["input"] != 0 else ()),
        _named("Which rows", SELECTION, report),
        listed("Slowest documents", SLOW, report["slowest"], ("worker",)),
        listed("Devices", DEVICE, look_up(report, "limits.devices") or ()),
        listed("Kernels that the workers tried", KERNEL, report["kernels"], ("why",)),
        listed("Starts", START, report["starts"], ("began", "took", "last sign of life")),
        listed("How the texts were made", MODEL, named_models, [*MODEL]),
    ]
    return [table for table in tables if table.rows]


def _named(title: str, figures: Figures, report: ReadOnly, about: str = "") -> Section:
    values = [(name, path, look_up(report, path)) for name, path in figures.items()]
    rows = [(name, shown(path, value)) for name, path, value in values if value is not None]
    return Section(title, ("", "value"), rows, about=about)


def listed(
    title: str,
    figures: Figures,
    entries: Iterable[Any],
    text_columns: Sequence[str] = (),
    about: str = "",
) -> Section:
    """Make a table with a row per entry."""
    rows = [[shown(path, look_up(entry, path)) for path in figures.values()] for entry in entries]
    return Section(title, [*figures], rows, text_columns, about)


def _paid_time(clock: ReadOnly) -> Section:
    entries = [
        {"kind": KIND_NAMES[kind], "share": share, "seconds": clock["paid_s"][kind]}
        for kind, share in (clock["shares"] or {}).items()
        if share
    ]
    return listed(
        "The workers' time", PAID, entries, about="Paid seconds, from process to release."
    )


def _phases(time: ReadOnly) -> Section:
    entries = [
        {"phase": PHASE_NAMES[name], "share": share, "seconds": share * time["busy_s"]}
        for name, share in time["shares"].items()
        if share is not None
    ]
    return listed("Where the time of the work went", PHASE, entries)


def _of_texts(report: ReadOnly) -> Iterator[Section]:
    done = num_texts(report)

    def counts(found: Mapping[str, int]) -> list[Values]:
        return [
            {"name": name, "rows": rows, "share": ratio(rows, done)} for name, rows in found.items()
        ]

    flags = [
        each | {"ids": report["flagged"][each["name"]]} for each in counts(report["quality_flags"])
    ]
    about = (
        "By quality_flags. DuckDB finds all that have one: select doc_id from "
        "'summaries/*.parquet' where list_contains(quality_flags, 'truncated')."
    )
    yield listed("Texts to look at", FLAG, flags, ("for example",), about)
    yield from _reviewed(report)
    yield from _gold(report)
    evidence = [
        {
            "field": field,
            "filled_share": ratio(of["documents"], done),
            "strings": of["strings"],
            "found_share": ratio(of["found"], of["strings"]),
        }
        for field, of in report["evidence"].items()
    ]
    about = (
        "Strings that do not stand in their document may be invented. DuckDB finds them: select * "
        "from (select doc_id, "
        "unnest(evidence) as found from 'summaries/*.parquet') where found.begin is null."
    )
    yield listed("Evidence", EVIDENCE, evidence, about=about)
    labels = [
        {
            "field": field,
            "value": value,
            **of,
            "share": ratio(of["documents"], done),
            "probability": ratio(of["probability_sum"], of["documents"]),
        }
        for field, values in report["choices"].items()
        for value, of in [*values.items()][:_MOST_VALUES]
    ]
    about = (
        "The likeliest value of each field that was scored; the column choices has the log "
        "probability of every value."
    )
    yield listed("Labels", CHOICE, labels, ("value",), about)
    yield listed("How the texts ended", ENDING, counts(report["finish_reasons"]))


def _gold(report: ReadOnly) -> Iterator[Section]:
    fields = [{"field": field, **of} for field, of in (report.get("gold") or {}).items()]
    about = (
        "Answers that equal input.gold, case aside, with Wilson's interval of 95%; Cohen's kappa "
        "of labels, F1 of the words of texts."
    )
    yield listed("Against the right answers", GOLD, fields, ("field",), about)
    groups = [{**each, **group} for each in fields for group in each["calibration"]]
    about = "Groups of equal size by exp(confidence), the mean probability of a token."
    yield listed("Accuracy by confidence", CALIBRATION, groups, about=about)
    labels = [
        {"field": each["field"], "label": label, **of}
        for each in fields
        for label, of in each["labels"].items()
    ]
    yield listed("Labels against the right answers", LABEL, labels, ("label",))
    confused = [
        (each["field"], *pair)
        for each in fields
        for pair in each["confusion"]
        if pair[0] != pair[1]
    ]
    texts = ("right answer", "answer")
    yield listed("Labels taken for others", CONFUSED, confused[:_MOST_VALUES], texts)


def _reviewed(report: ReadOnly) -> Iterator[Section]:
    found = report.get("reviewed") or {}
    named = {
        "good, of all answers": found.get("good"),
        "good, of those without a flag": found.get("unflagged"),
        "bad, of those with a flag": found.get("flagged"),
        **{f"bad, of those with {flag}": of for flag, of in found.get("flags", {}).items()},
    }
    about = (
        "Verdicts of people on a sample (export --sample), weighted as it was drawn, with "
        "intervals of 95%. A flag is right where the answer is bad."
    )
    entries = [{"name": name, **of} for name, of in named.items() if of]
    yield listed("Reviewed by people", REVIEWED, entries, ("answers that are",), about)


def render(report: ReadOnly) -> str:
    """Render the report as tables for a terminal, then its findings."""
    return to_text([*sections(report), *(advice["says"] for advice in report["advice"])])


def render_audit(found: ReadOnly) -> str:
    """Render an audit: its figures, and a line for each different document."""
    table = _named("Audit", AUDIT, {"audit": found})
    lines = [
        f"{each['doc_id']}: {each['outcome']}, {each['error'] or thousandths(each['gap'])}"
        for each in found["not_equal"]
    ]
    return to_text([table, *lines])


def render_outcome(report: ReadOnly, width: int = 110) -> str:
    """Render the end of a run in about fifteen lines."""
    advice = [("finding", each["says"]) for each in report["advice"]]
    done, rows_in = (look_up(report, f"rows.{name}") for name in ("done", "input"))
    outcome = [
        ("rows done", number(done) + ("" if rows_in is None else f" of {rows_in:,}")),
        ("rows failed", _failures(report)),
        *(("cut", line) for line in cut_documents(report)),
        *_named("", OUTCOME, report).rows,
        *advice[:MOST_FINDINGS],
    ]
    if (more := len(advice) - MOST_FINDINGS) > 0:
        outcome.append(("", f"{counted(more, 'more finding')} in the report"))
    return to_text([Section("", ("", ""), outcome, [""])], width)


def _failures(report: ReadOnly) -> str:
    failed = number(report["rows"]["errors"])
    errors = report["errors"]
    if not errors:
        return failed
    classes = ", ".join(
        f"{error['rows']:,} {error['error_class']}" for error in errors[:MOST_CLASSES]
    )
    example = f"{shortened(errors[0]['example_doc_id'])}: {message(errors[0]['example_message'])}"
    partial = num_texts(report) - report["rows"]["done"]
    kept = f"; {number(partial)} have the answers of other tasks" if partial else ""
    more = ", ..." if errors[MOST_CLASSES:] else ""
    return f"{failed}: {classes}{more}{kept}; for example {example}"


def to_text(parts: Iterable[Section | str], width: int = 110) -> str:
    """Render tables and sentences without colours. A table without a title has no lines."""
    text = io.StringIO()
    console = Console(
        file=text, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else _table(part))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left")
    if not section.title:
        table = Table(box=None, padding=(0, 0, 0, 2), show_header=any(section.header))
    for index, name in enumerate(section.header):
        is_text = index == 0 or name in section.text_columns
        table.add_column(name, justify="left" if is_text else "right")
    for row in section.rows:
        table.add_row(*map(printable, row))
    return table
