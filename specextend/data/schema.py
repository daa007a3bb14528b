"""Columns of output rows, and conversion of results into rows."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from specextend.core import Completion, ReadOnly, Values, mended
from specextend.data.answers import answer_columns, answer_fields
from specextend.data.confidence import CONFIDENCE, confidence_column, confidence_field
from specextend.data.prompts import Prompt
from specextend.data.quality import Quality
from specextend.stats import DecodingStats

EVIDENCE = pa.struct(
    [
        ("field", "string"),
        ("value", "string"),
        ("begin", "int64"),
        ("end", "int64"),
        ("page", "int32"),
        ("score", "float64"),
    ]
)
"""String of an answer with its place."""

SOURCE = pa.struct(
    [
        ("sentence", "string"),
        ("begin", "int64"),
        ("end", "int64"),
        ("page", "int32"),
        ("score", "float64"),
        ("passage", "string"),
    ]
)
"""Sentence of a text with a supporting passage."""

FIGURE = pa.struct(
    [
        *((name, pa.string()) for name in ("text", "kind", "value", "unit", "found")),
        ("begin", pa.int64()),
        ("end", pa.int64()),
        ("page", pa.int32()),
    ]
)
"""Figure of a text with its place."""

VERDICT = pa.struct([("field", "string"), ("sentence", "string"), ("probability", "float64")])
"""Sentence of a text, or string of an answer, with the target's probability of yes."""

PART_SUMMARY = pa.struct(
    [
        ("begin", "int64"),
        ("end", "int64"),
        ("page", "int32"),
        ("last_page", "int32"),
        ("text", "string"),
        ("finish_reason", "string"),
    ]
)
"""Text about a part with its place."""

CHOICE = pa.struct([("field", "string"), ("value", "string"), ("log_prob", "float64")])
"""Value with its log probability, normalised over the values of its field."""


def _columns(kind: str, *names: str) -> list[tuple[str, str]]:
    return [(name, kind) for name in names]


SUMMARY_SCHEMA = pa.schema(
    [
        *_columns("string", "doc_id", "summary", "finish_reason"),
        *_columns("int32", "num_prompt_tokens", "num_output_tokens", "num_dropped_tokens"),
        ("length_policy", "string"),
        ("part_summaries", pa.list_(PART_SUMMARY)),
        *_columns(
            "int32", "num_spec_steps", "num_plain_steps", "num_draft_tokens", "num_accepted_tokens"
        ),
        *_columns("float64", "mean_acceptance_length", "draft_acceptance_rate"),
        ("acceptance_histogram", pa.list_(pa.int32())),
        ("num_retrievals", "int32"),
        *_columns(
            "float64",
            "retrieval_coverage",
            "retrieval_churn",
            "queue_s",
            "ttft_s",
            "decode_s",
            "total_s",
            "prefill_s",
            "draft_prefill_s",
            "draft_s",
            "verify_s",
            "retrieval_s",
            "other_s",
        ),
        ("output_tokens_per_s", "float64"),
        ("quality_flags", pa.list_(pa.string())),
        ("worker", "string"),
        *_columns("int32", "attempts", "num_fallbacks", "num_hybrid_steps", "num_memory_retries"),
        ("started_at", pa.timestamp("ms", tz="UTC")),
        *_columns("float64", "copied_fraction", "rouge1", "rouge2", "rougeL", "num_forwards"),
        ("content_sha256", "string"),
        ("coverage", "float64"),
        *_columns("int32", "num_requests", "num_cached_tokens"),
        ("reasoning", "string"),
        ("evidence", pa.list_(EVIDENCE)),
        ("choices", pa.list_(CHOICE)),
        ("sources", pa.list_(SOURCE)),
        *_columns("int32", "max_new_tokens", "num_network_steps", "num_first_accepted"),
        ("figures", pa.list_(FIGURE)),
    ]
)
"""Columns of `summaries/`, before passthrough columns."""

FAILURE = pa.schema([*_columns("string", "error_class", "message", "stage"), ("retryable", "bool")])
"""Failure of a document or task; null after success."""
WORDS = pa.struct([("held", pa.list_(pa.string())), ("other", pa.list_(pa.string()))])
"""Distinct content words of an answer, by whether its document has them."""
OF_DOCUMENT = ("doc_id", "content_sha256", "worker", "attempts", "started_at", "queue_s")
"""Columns that describe the document and no task."""
TASKS = pa.list_(
    pa.struct(
        [
            *_columns("string", "name", "text"),
            *FAILURE,
            *(each for each in SUMMARY_SCHEMA if each.name not in {*OF_DOCUMENT, "summary"}),
            ("confidence", CONFIDENCE),
            ("verdicts", pa.list_(VERDICT)),
        ]
    )
)
COMMITTED_TASKS = pa.list_(pa.struct([*TASKS.value_type, ("words", WORDS)]))
_STATES = pa.list_(pa.struct([("name", "string"), *FAILURE]))
_TEXTS = pa.list_(pa.struct(_columns("string", "name", "text", "error_class")))

ERROR_SCHEMA = pa.schema(
    [
        ("key", pa.struct([("file", "int32"), ("row", "int64")])),
        ("doc_id", "string"),
        *FAILURE,
        ("attempts", "int32"),
        *_columns("string", "content_sha256", "summary"),
    ]
)
"""Columns of `errors/`, before passthrough columns."""

COMMIT_SCHEMA = pa.schema(
    [
        ("file", "int32"),
        ("row", "int64"),
        *SUMMARY_SCHEMA,
        *(field for field in ERROR_SCHEMA if field.name not in ("key", *SUMMARY_SCHEMA.names)),
        ("tasks", COMMITTED_TASKS),
        ("words", WORDS),
        ("confidence", CONFIDENCE),
        ("verdicts", pa.list_(VERDICT)),
    ]
)
"""Columns of `_run/parts/`. Finished rows have a null `error_class`, error rows a null
`finish_reason`. Rows with some failed tasks have both.
"""

_FROM_STATS = [name for name in SUMMARY_SCHEMA.names if hasattr(DecodingStats(), name)]


def decoded_columns(completion: Completion, prompt: Prompt, quality: Quality) -> Values:
    """Return the columns about a prompt and its text."""
    return {
        "summary": completion.text,
        "finish_reason": completion.finish_reason,
        "num_dropped_tokens": prompt.num_dropped_tokens,
        "length_policy": prompt.length_policy,
        "coverage": prompt.coverage,
        "choices": [each._asdict() for each in completion.scored] or None,
        **stats_columns(completion.stats),
        **quality._asdict(),
    }


def stats_columns(stats: DecodingStats) -> Values:
    """Return the columns of counts and seconds."""
    return {
        **{name: getattr(stats, name) for name in _FROM_STATS},
        "acceptance_histogram": stats.acceptance_histogram or None,
    }


def failure_of(tasks: Iterable[ReadOnly]) -> Values:
    """Return the FAILURE columns of a document from its `tasks`: the first class and stage, all
    messages.
    """
    failed = [each for each in tasks if each["error_class"] is not None]
    if not failed:
        return dict.fromkeys(FAILURE.names)
    return {
        "error_class": failed[0]["error_class"],
        "message": "; ".join(f"task {each['name']}: {each['message']}" for each in failed),
        "stage": failed[0]["stage"],
        "retryable": any(each["retryable"] for each in failed),
    }


def task_failures(tasks: pa.ChunkedArray) -> pa.Table:
    """Return `failure_of` for each row."""
    entries = tasks.cast(_STATES).to_pylist()
    return pa.Table.from_pylist([failure_of(each or ()) for each in entries], FAILURE)


def rows_table(rows: Iterable[ReadOnly], schema: pa.Schema) -> pa.Table:
    """Convert rows to a table, with U+FFFD for lone surrogates."""
    rows = list(rows)
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:
        return pa.Table.from_pylist(mended(rows), schema=schema)


class TextColumns(NamedTuple):
    """Columns for the model's texts and answers."""

    text: str = "summary"
    answers: str | None = None
    """JSON Schema of the answers."""
    others: tuple[tuple[str, str, str | None], ...] = ()
    """Name, text column and schema of further tasks."""
    has_confidence: bool = False
    has_verdicts: bool = False
    has_pages: bool = False
    """True if places name their pages."""


_USUAL = TextColumns()


def text_columns(config: ReadOnly) -> TextColumns:
    """Return the text columns of a configuration in JSON values."""
    of_first: Mapping[str, Any] = config.get("output", {})
    text = of_first.get("column", "summary")
    named = [(name, own["output"]) for name, own in config.get("tasks", {}).items()]
    others = [(name, own["column"], own["schema"]) for name, own in named if own["column"] != text]
    outputs = [of_first, *(own["output"] for own in config.get("tasks", {}).values())]
    return TextColumns(
        text,
        of_first.get("schema"),
        tuple(others),
        of_first.get("confidence", False),
        any(each.get("verify", False) for each in outputs),
        config.get("input", {}).get("pages_column") is not None,
    )


def error_schema(passthrough: Iterable[pa.Field], columns: TextColumns = _USUAL) -> pa.Schema:
    """Return the schema of error rows; passthrough columns with a taken name get a `_` suffix."""
    tasks = _with_pages([_tasks(columns)] if columns.others else [], columns)
    ours = pa.schema([*_named(ERROR_SCHEMA, columns.text), *tasks])
    return pa.schema(
        [
            *ours,
            *(each.with_name(each.name + "_" * (each.name in ours.names)) for each in passthrough),
        ]
    )


def summary_fields(columns: TextColumns = _USUAL) -> list[pa.Field]:
    """Return the columns of `summaries/`, without passthrough columns."""
    fields = _with_pages(_named(SUMMARY_SCHEMA, columns.text), columns)
    if columns.has_confidence:
        fields.append(confidence_field(columns.answers))
    if columns.has_verdicts:
        fields.append(COMMIT_SCHEMA.field("verdicts"))
    fields += answer_fields(columns.answers)
    for _, text, answers in columns.others:
        fields += [pa.field(text, pa.string()), *answer_fields(answers)]
    tasks = [_tasks(columns)] if columns.others else []
    return [*fields, *_with_pages(tasks, columns)]


def _tasks(columns: TextColumns) -> pa.Field:
    kept = [each for each in TASKS.value_type if columns.has_verdicts or each.name != "verdicts"]
    return pa.field("tasks", pa.list_(pa.struct(kept)))


def _with_pages(fields: list[pa.Field], columns: TextColumns) -> list[pa.Field]:
    return fields if columns.has_pages else without_pages(fields)


def summary_columns(rows: pa.Table, columns: TextColumns) -> list[pa.ChunkedArray | pa.Array]:
    """Return the values of `summary_fields` from rows of COMMIT_SCHEMA."""
    ours = zip(SUMMARY_SCHEMA.names, summary_fields(columns), strict=False)
    found = [rows[name].cast(field.type) for name, field in ours]
    if columns.has_confidence:
        found.append(confidence_column(columns.answers, rows["confidence"]))
    if columns.has_verdicts:
        found.append(rows["verdicts"])
    found += answer_columns(columns.answers, rows["summary"])
    if not columns.others:
        return found
    texts = [
        {each["name"]: each["text"] for each in tasks or () if each["error_class"] is None}
        for tasks in rows["tasks"].cast(_TEXTS).to_pylist()
    ]
    for name, _, answers in columns.others:
        written = pa.chunked_array([[each.get(name) for each in texts]], pa.string())
        found += [written, *answer_columns(answers, written)]
    return [*found, rows["tasks"].cast(summary_fields(columns)[-1].type)]


def _named(schema: pa.Schema, text_column: str) -> list[pa.Field]:
    return [field.with_name(text_column) if field.name == "summary" else field for field in schema]


def with_pages(columns: ReadOnly, starts: Sequence[int]) -> Values:
    """Return columns of an answer in which each place names its page.

    Args:
        starts: Offsets at which the pages begin; empty for a document without pages.
    """
    return dict(columns) | {
        name: [place | _pages_of(name, place, starts) for place in columns[name]]
        for name in ("part_summaries", "evidence", "sources", "figures")
        if starts and columns[name]
    }


def _pages_of(name: str, place: ReadOnly, starts: Sequence[int]) -> Values:
    if place["begin"] is None:
        return {}
    found = {"page": bisect_right(starts, place["begin"])}
    if name == "part_summaries":
        found["last_page"] = bisect_right(starts, place["end"] - 1)
    return found


def without_pages(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Return fields of a schema without fields for pages."""
    return [field.with_type(_without_pages(field.type)) for field in fields]


def _without_pages(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_without_pages(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct(
            without_pages(field for field in kind if field.name not in ("page", "last_page"))
        )
    return kind
